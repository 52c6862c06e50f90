//! Each crate has a README, a changelog and licences, and inherits the workspace's lints.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use cargo_metadata::Package;

use super::Problem;
use crate::workspace::{Workspace, crate_folder, is_published};

/// Checks the files in the crate's folder, and the manifest.
pub fn check(workspace: &Workspace, package: &Package) -> Result<Vec<Problem>> {
    let folder = crate_folder(package);
    let mut problems = Vec::new();
    for name in ["README.md", "CHANGELOG.md"] {
        let path = folder.join(name);
        let filled = fs::read_to_string(&path).is_ok_and(|text| !text.trim().is_empty());
        if !filled {
            problems.push(Problem::of(&path, "is missing or empty"));
        }
    }
    // A package contains only the files of its folder, and both licences must be distributed with
    // the code. They are copies, because a checkout without symbolic links has only the path of a
    // link's target.
    let licences = ["LICENSE-APACHE", "LICENSE-MIT"];
    for name in licences.into_iter().filter(|_| is_published(package)) {
        let path = folder.join(name);
        let text = read(&workspace.root().join(name))?;
        if !path.is_file() || path.is_symlink() || read(&path)? != text {
            problems.push(Problem::of(&path, "is not a copy of the licence at the root"));
        }
    }
    let manifest = package.manifest_path.as_std_path();
    if !inherits_lints(&read(manifest)?) {
        problems.push(Problem::of(manifest, "lacks `[lints] workspace = true`"));
    }
    Ok(problems)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Whether the `[lints]` table has `workspace = true`.
fn inherits_lints(manifest: &str) -> bool {
    let lines = manifest.lines().map(str::trim);
    let table = lines.skip_while(|line| *line != "[lints]").skip(1);
    table
        .take_while(|line| !line.starts_with('['))
        .any(|line| line.split('#').next().is_some_and(|setting| is_true(setting, "workspace")))
        || manifest.lines().any(|line| is_true(line, "lints.workspace"))
}

fn is_true(line: &str, key: &str) -> bool {
    line.split_once('=').is_some_and(|(name, value)| name.trim() == key && value.trim() == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inherited_lints_are_recognised() {
        for text in [
            "[package]\nname = \"a\"\n\n[lints]\nworkspace = true # all of them\n\n[dependencies]\n",
            "lints.workspace = true\n[package]\n",
        ] {
            assert!(inherits_lints(text), "{text}");
        }
    }

    #[test]
    fn other_manifests_are_not() {
        for text in [
            "[package]\nname = \"a\"\n",
            "[package]\nversion.workspace = true\n",
            "[lints]\nworkspace = false\n",
            "[lints]\n[dependencies]\nworkspace = true\n",
            "#[lints]\nworkspace = true\n",
        ] {
            assert!(!inherits_lints(text), "{text}");
        }
    }
}
