//! `doc`: the documentation of the workspace, without a single warning.

use anyhow::Result;

use crate::command::Tool;
use crate::commands::nixl::with_nixl;
use crate::workspace::Workspace;

/// The options of `cargo xtask doc`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Opens the pages in a browser afterwards
    #[arg(long)]
    open: bool,
}

/// Builds the pages of all members with all their features.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<()> {
    with_nixl(workspace, Tool::cargo(workspace))?
        .env("RUSTDOCFLAGS", "-D warnings")
        .args(["doc", "--workspace", "--no-deps", "--all-features"])
        .args(arguments.open.then_some("--open"))
        .run()
}
