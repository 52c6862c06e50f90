//! The facade without its default features stays small, so that a user of geometry and host
//! transfers builds few packages.

use anyhow::{Context, Result};

use super::Problem;
use crate::command::Tool;
use crate::workspace::Workspace;

/// The facade.
const FACADE: &str = "terrane";

/// The maximum number of packages of the facade without features, including itself.
const MOST_PACKAGES: usize = 25;

/// Counts the packages.
pub fn check(workspace: &Workspace) -> Result<Option<Problem>> {
    let package = workspace.member(FACADE).context("the workspace has no facade")?;
    let tree = Tool::cargo(workspace)
        .args(["tree", "--quiet", "--package", FACADE, "--no-default-features"])
        .args(["--edges", "normal", "--prefix", "none", "--no-dedupe", "--format", "{p}"])
        .stdout()?;
    let message = too_many_packages(&packages(&tree));
    Ok(message.map(|message| Problem::of(package.manifest_path.as_std_path(), message)))
}

/// Returns each package of a tree once. Cargo marks procedural macros.
fn packages(tree: &str) -> Vec<&str> {
    let lines = tree.lines().map(|line| line.trim().trim_end_matches(" (proc-macro)"));
    let mut packages: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

fn too_many_packages(packages: &[&str]) -> Option<String> {
    (packages.len() > MOST_PACKAGES).then(|| {
        format!(
            "without default features it needs {} packages, the limit is {MOST_PACKAGES}; make a \
             dependency optional: {}",
            packages.len(),
            packages.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_package_counts_once() {
        let tree = "terrane v0.1.0 (/a)\nsyn v2.0.1\nx-impl v1.0.0 (proc-macro)\nsyn v2.0.1\n\n";
        assert_eq!(packages(tree), ["syn v2.0.1", "terrane v0.1.0 (/a)", "x-impl v1.0.0"]);
    }

    #[test]
    fn one_package_too_many_is_found() {
        assert_eq!(too_many_packages(&["a"; MOST_PACKAGES]), None);
        let found = too_many_packages(&["a"; MOST_PACKAGES + 1]).unwrap();
        assert!(found.contains("26 packages"), "{found}");
    }
}
