//! `fmt` and `lint`: rustfmt, clippy and ruff over the whole workspace.

use anyhow::Result;

use crate::command::Tool;
use crate::commands::nixl::with_nixl;
use crate::site;
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

/// Lints the Python files, then the Rust code.
pub fn lint(workspace: &Workspace) -> Result<()> {
    ruff(workspace)?;
    clippy(workspace)
}

/// Finds names that no statement defines, unused imports and syntax errors in the Python files.
///
/// Many of them run only with an engine or on a device, so no other step would notice.
fn ruff(workspace: &Workspace) -> Result<()> {
    let requirements = workspace.root().join("xtask/src/commands/ruff.txt");
    let tools = site::provide_program(workspace, &workspace.target().join("ruff"), &requirements)?;
    Tool::new(workspace, tools.join("bin/ruff"))
        .args(["check", "--quiet", "--isolated", "--no-cache", "--select", "E9,F"])
        .run()
}

/// Lints every target twice, with default and with all features, because a feature may hide code or
/// add it.
fn clippy(workspace: &Workspace) -> Result<()> {
    for features in [&[][..], &["--all-features"][..]] {
        with_nixl(workspace, Tool::cargo(workspace))?
            .args(["clippy", "--workspace", "--all-targets"])
            .args(features)
            .args(["--", "-D", "warnings"])
            .run()?;
    }
    Ok(())
}
