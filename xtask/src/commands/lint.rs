//! `fmt` and `lint`: rustfmt and clippy over the whole workspace.

use anyhow::Result;

use crate::command::Tool;
use crate::commands::nixl::with_nixl;
use crate::workspace::Workspace;

/// The options of `cargo xtask fmt`.
#[derive(Debug, clap::Args)]
pub struct FmtArguments {
    /// Changes nothing; fails if a file is not formatted
    #[arg(long)]
    check: bool,
}

/// Formats, or checks the format.
pub fn fmt(workspace: &Workspace, arguments: &FmtArguments) -> Result<()> {
    if arguments.check {
        return check_format(workspace);
    }
    Tool::cargo(workspace).args(["fmt", "--all"]).run()
}

/// Fails if a file is not formatted.
pub fn check_format(workspace: &Workspace) -> Result<()> {
    Tool::cargo(workspace).args(["fmt", "--all", "--check"]).run()
}

/// Lints every target twice, with default and with all features, because a feature may hide code or
/// add it.
pub fn clippy(workspace: &Workspace) -> Result<()> {
    for features in [&[][..], &["--all-features"][..]] {
        with_nixl(workspace, Tool::cargo(workspace))?
            .args(["clippy", "--workspace", "--all-targets"])
            .args(features)
            .args(["--", "-D", "warnings"])
            .run()?;
    }
    Ok(())
}
