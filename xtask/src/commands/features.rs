//! `features`: each library crate alone, as in the build of a user who needs only that crate.
//!
//! A build of the whole workspace unites the features of all members. A crate that lacks a feature
//! of its dependency still compiles there.

use anyhow::Result;

use crate::command::Tool;
use crate::commands::nixl::with_nixl_for;
use crate::workspace::Workspace;

/// Lints the library target of each published crate in each combination of its features.
pub fn run(workspace: &Workspace) -> Result<()> {
    for package in workspace.libraries() {
        let features: Vec<&str> = package.features.keys().map(String::as_str).collect();
        for combination in combinations(&features) {
            let cargo = with_nixl_for(workspace, Tool::cargo(workspace), &[package])?;
            cargo
                .args(["clippy", "--quiet", "--lib", "--package", package.name.as_str()])
                .args(combination)
                .args(["--", "-D", "warnings"])
                .run()?;
        }
    }
    Ok(())
}

/// Returns the combinations: no features, the default ones, each feature alone, and all features.
/// Each combination is listed once.
fn combinations(features: &[&str]) -> Vec<Vec<String>> {
    let mut combinations = vec![Vec::new()];
    if features.contains(&"default") {
        combinations.push(vec![String::from("--no-default-features")]);
    }
    let own: Vec<&&str> = features.iter().filter(|feature| **feature != "default").collect();
    if own.len() > 1 {
        combinations.extend(
            own.iter().map(|name| {
                vec![String::from("--no-default-features"), format!("--features={name}")]
            }),
        );
    }
    if !own.is_empty() {
        combinations.push(vec![String::from("--all-features")]);
    }
    combinations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(features: &[&str]) -> Vec<String> {
        combinations(features).iter().map(|combination| combination.join(" ")).collect()
    }

    #[test]
    fn each_combination_is_listed_once() {
        assert_eq!(lines(&[]), [""]);
        assert_eq!(lines(&["a"]), ["", "--all-features"]);
        assert_eq!(
            lines(&["a", "b"]),
            [
                "",
                "--no-default-features --features=a",
                "--no-default-features --features=b",
                "--all-features",
            ]
        );
        assert_eq!(lines(&["a", "default"]), ["", "--no-default-features", "--all-features"]);
    }
}
