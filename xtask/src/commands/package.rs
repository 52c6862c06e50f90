//! `package`: the packages of all published crates, each built from its own files.
//!
//! Cargo builds each package against the packages of the other members, which it unpacks into a
//! folder of sources (`CARGO_HOME/registry/src/-HASH`). Cargo treats them as packages of a registry
//! and does not see changes since the last run. So this command removes the copies and their build
//! outputs before and after each run.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::command::Tool;
use crate::commands::nixl::with_nixl_for;
use crate::workspace::Workspace;

/// The workspace's own setting. Packages are built outside of the workspace. With the same setting,
/// cargo reuses the compiled dependencies of the workspace.
const DEBUG: (&str, &str) = ("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");

/// The same for build scripts, macros, and their dependencies.
const HOST_DEBUG: &str = "CARGO_PROFILE_DEV_BUILD_OVERRIDE_DEBUG";

/// The folder into which cargo unpacks the packages of a local registry.
const COPIES: &str = "/registry/src/-";

/// Packages each published crate, and builds its library from the package. Its dependencies in the
/// workspace are also built from their packages. Publishes nothing and uses no network.
pub fn run(workspace: &Workspace) -> Result<()> {
    let libraries = workspace.libraries();
    let compiled = workspace.target().join("debug");
    forget_copies(&compiled)?;
    let built = with_nixl_for(workspace, Tool::cargo(workspace), &libraries)?
        .env(DEBUG.0, DEBUG.1)
        .env(HOST_DEBUG, DEBUG.1)
        // Uncommitted changes are checked too.
        .args(["package", "--offline", "--allow-dirty"])
        .args(libraries.iter().flat_map(|package| ["--package", package.name.as_str()]))
        .run();
    forget_copies(&compiled)?;
    built
}

/// Removes the copies that were compiled into this folder, and their build outputs.
fn forget_copies(compiled: &Path) -> Result<()> {
    let mut copies = BTreeSet::new();
    for file in files(&compiled.join("deps"))? {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if !stem.starts_with("terrane") || file.extension().is_none_or(|end| end != "d") {
            continue;
        }
        let text = read(&file)?;
        let Some(copy) = copy_of(&text) else { continue };
        copies.insert(copy);
        // `terrane_core-0123abcd`, and the folder `terrane-core-0123abcd`.
        remove(fs::remove_dir_all(compiled.join(".fingerprint").join(stem.replace('_', "-"))))?;
        for end in ["rlib", "rmeta"] {
            remove(fs::remove_file(compiled.join("deps").join(format!("lib{stem}.{end}"))))?;
        }
    }
    // Before the lists of sources are removed. After an interruption, the next run needs them to
    // find the copies.
    for copy in copies {
        remove(fs::remove_dir_all(copy))?;
    }
    for file in files(&compiled.join("deps"))? {
        if file.extension().is_some_and(|end| end == "d") && copy_of(&read(&file)?).is_some() {
            remove(fs::remove_file(file))?;
        }
    }
    Ok(())
}

/// Returns the folder of copies that a crate was compiled from, by cargo's list of its sources.
fn copy_of(sources: &str) -> Option<PathBuf> {
    let path = sources.split_whitespace().find(|word| word.contains(COPIES))?;
    let (home, rest) = path.split_once(COPIES)?;
    let (hash, _) = rest.split_once('/')?;
    let is_hash = !hash.is_empty() && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then(|| PathBuf::from(format!("{home}{COPIES}{hash}")))
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.with_context(|| format!("cannot read {}", folder.display()))?,
    };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>();
    paths.with_context(|| format!("cannot read {}", folder.display()))
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

/// Ignores the error of a file that does not exist.
fn remove(removed: std::io::Result<()>) -> Result<()> {
    match removed {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).context("cannot remove what was compiled from a package")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_setting_is_that_of_the_workspace() {
        let root = Workspace::load().unwrap().root().join("Cargo.toml");
        let manifest = fs::read_to_string(root).unwrap();
        let (_, profile) = manifest.split_once("[profile.dev]").unwrap();
        let (profile, _) = profile.split_once("\n[").unwrap();
        assert!(profile.contains(&format!("debug = \"{}\"", DEBUG.1)), "{profile}");
    }

    #[test]
    fn copies_are_forgotten_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let (compiled, home) = (folder.path().join("debug"), folder.path().join("home"));
        let copy = home.join("registry/src/-03b006166a930c0d");
        let index = home.join("registry/src/index-1949cf8c6b5b557f");
        for folder in [&copy.join("terrane-core-0.1.0"), &index, &compiled.join("deps")] {
            fs::create_dir_all(folder).unwrap();
        }
        let kinds = [
            ("terrane_core-aa", copy.join("terrane-core-0.1.0/src/lib.rs")),
            ("terrane_core-bb", PathBuf::from("crates/terrane-core/src/lib.rs")),
            ("libc-cc", index.join("libc-0.2/src/lib.rs")),
        ];
        for (stem, source) in &kinds {
            let file = |name: String| compiled.join("deps").join(name);
            fs::write(file(format!("{stem}.d")), format!("x.d: {}\n", source.display())).unwrap();
            fs::write(file(format!("lib{stem}.rlib")), "").unwrap();
            let fingerprint = compiled.join(".fingerprint").join(stem.replace('_', "-"));
            fs::create_dir_all(fingerprint).unwrap();
        }
        forget_copies(&compiled).unwrap();
        let left = |path: PathBuf| path.exists();
        assert!(!left(copy) && left(index));
        for (stem, kept) in
            [("terrane_core-aa", false), ("terrane_core-bb", true), ("libc-cc", true)]
        {
            assert_eq!(left(compiled.join(format!("deps/{stem}.d"))), kept, "{stem}");
            assert_eq!(left(compiled.join(format!("deps/lib{stem}.rlib"))), kept, "{stem}");
            let fingerprint = compiled.join(".fingerprint").join(stem.replace('_', "-"));
            assert_eq!(left(fingerprint), kept, "{stem}");
        }
        forget_copies(&folder.path().join("none")).unwrap();
    }
}
