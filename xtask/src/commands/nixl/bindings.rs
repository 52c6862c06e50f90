//! `nixl --bindings`: checks `terrane-nixl` with the lowest and the highest supported release of
//! `nixl-sys`.
//!
//! `nixl-sys` links a native library, so a build has only one version of it. If another crate of a
//! program needs another release, both crates must accept a range.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::{BINDINGS, CRATE, with_nixl};
use crate::command::Tool;
use crate::workspace::Workspace;

/// The bounds of the range. A test compares them with the root manifest.
const RELEASES: [&str; 2] = ["1.5.0", "1.5.2"];

/// Checks `terrane-nixl` with each of the two releases, in a separate workspace below
/// `target/bindings`.
pub fn check(workspace: &Workspace) -> Result<()> {
    for release in RELEASES {
        let folder = workspace.target().join("bindings").join(release);
        generate(workspace, &folder)
            .with_context(|| format!("cannot write {}", folder.display()))?;
        let manifest = folder.join("Cargo.toml");
        println!("nixl: {CRATE} with {BINDINGS} {release}");
        Tool::cargo(workspace)
            .args(["update", "--quiet", "--package", BINDINGS, "--precise", release])
            .arg("--manifest-path")
            .arg(&manifest)
            .run()?;
        with_nixl(workspace, Tool::cargo(workspace))?
            .args(["check", "--quiet", "--manifest-path"])
            .arg(&manifest)
            .arg("--target-dir")
            .arg(workspace.target().join("bindings/target"))
            .run()?;
    }
    Ok(())
}

fn generate(workspace: &Workspace, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("Cargo.toml"), manifest(workspace.root()))?;
    fs::write(folder.join("src/lib.rs"), "//! Generated.\npub use terrane_nixl::NixlEngine;\n")?;
    // All other dependencies have the releases that the workspace is tested with.
    fs::copy(workspace.root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    Ok(())
}

fn manifest(root: &Path) -> String {
    format!(
        "[package]\n\
         name = \"bindings\"\n\
         version = \"0.0.0\"\n\
         edition = \"2024\"\n\
         publish = false\n\
         \n\
         [workspace]\n\
         \n\
         [dependencies]\n\
         {CRATE} = {{ path = {:?} }}\n",
        root.join("crates").join(CRATE),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checked_releases_are_the_bounds_of_the_requirement() {
        let workspace = Workspace::load().unwrap();
        let nixl = workspace.member(CRATE).unwrap();
        let bindings = nixl.dependencies.iter().find(|found| found.name == BINDINGS).unwrap();
        let [lowest, highest] = RELEASES;
        assert!(bindings.req.to_string().contains(&format!(">={lowest}")), "{}", bindings.req);
        assert!(RELEASES.iter().all(|release| bindings.req.matches(&release.parse().unwrap())));
        assert!(lowest < highest);
    }

    #[test]
    fn the_manifest_is_a_workspace_of_its_own() {
        let text = manifest(Path::new("/a b"));
        assert!(text.contains("[workspace]\n"), "{text}");
        assert!(text.contains("terrane-nixl = { path = \"/a b/crates/terrane-nixl\" }"), "{text}");
    }
}
