//! `features`: each library crate alone, as a user who takes only that crate would build it.
//!
//! A build of the whole workspace unites the features of all members, so that a crate which
//! forgot to ask for a feature of its dependency still compiles there.

use anyhow::Result;

use crate::command::Tool;
use crate::workspace::Workspace;

const COMBINATIONS: [&[&str]; 3] = [&["--no-default-features"], &[], &["--all-features"]];

/// Lints the library target of each published crate in each combination.
pub fn run(workspace: &Workspace) -> Result<()> {
    for package in workspace.libraries() {
        for features in COMBINATIONS {
            if features.len() == 1 && package.features.is_empty() {
                continue; // All combinations are the same one.
            }
            Tool::cargo(workspace)
                .args(["clippy", "--quiet", "--lib", "--package", package.name.as_str()])
                .args(features)
                .args(["--", "-D", "warnings"])
                .run()?;
        }
    }
    Ok(())
}
