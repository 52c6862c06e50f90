//! `deny`: licences, bans and sources of all dependencies, checked by cargo-deny.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::command::Tool;
use crate::workspace::Workspace;

/// The version that is installed if there is none, or only an older one.
const VERSION: &str = "0.20.2";

/// The oldest minor version (of 0.x) that can read `deny.toml`.
const OLDEST_MINOR: u32 = 18;

/// Runs all checks that work offline. The check of advisories needs the network.
pub fn run(workspace: &Workspace) -> Result<()> {
    let program = match find(workspace) {
        Some(program) => program,
        None => install(workspace)?,
    };
    Tool::new(workspace, program)
        .args([
            "--all-features",
            "--workspace",
            "--locked",
            "check",
            "--hide-inclusion-graph",
            // deny.toml may name a boundary crate before the workspace depends on it.
            "--allow",
            "unused-wrapper",
        ])
        .args(["bans", "licenses", "sources"])
        .run()
}

/// The program under `target/tools` or on the PATH, if it is recent enough.
fn find(workspace: &Workspace) -> Option<PathBuf> {
    [installed(workspace), PathBuf::from("cargo-deny")].into_iter().find(|program| {
        Tool::new(workspace, program)
            .arg("--version")
            .probe()
            .and_then(|text| minor_version(&text))
            .is_some_and(|minor| minor >= OLDEST_MINOR)
    })
}

/// Compiles the pinned version of the registry, with settings for a short compile time. It takes
/// about a minute on two cores. The unoptimised program checks this workspace in a second.
fn install(workspace: &Workspace) -> Result<PathBuf> {
    let build = tools(workspace).join("build");
    println!(
        "cargo-deny is not installed; compiling {VERSION} under {}",
        tools(workspace).display()
    );
    Tool::cargo(workspace)
        .env("CARGO_TARGET_DIR", &build)
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .args(["install", "--quiet", "cargo-deny", "--locked", "--version", VERSION])
        .args(["--no-default-features", "--force", "--root"])
        .arg(tools(workspace))
        .run()
        .context(
            "cargo-deny is needed to check licences; install it with `cargo install cargo-deny`",
        )?;
    fs::remove_dir_all(&build).with_context(|| format!("cannot remove {}", build.display()))?;
    Ok(installed(workspace))
}

fn tools(workspace: &Workspace) -> PathBuf {
    workspace.target().join("tools")
}

fn installed(workspace: &Workspace) -> PathBuf {
    tools(workspace).join(Path::new("bin/cargo-deny"))
}

/// Reads `cargo-deny 0.20.2`. Versions from 1.0 on count as newer than any 0.x.
fn minor_version(text: &str) -> Option<u32> {
    let version = text.trim().strip_prefix("cargo-deny ")?;
    let mut parts = version.split('.');
    let major: u32 = parts.next()?.parse().ok()?;
    let minor: u32 = parts.next()?.parse().ok()?;
    Some(if major == 0 { minor } else { u32::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(minor_version("cargo-deny 0.20.2\n"), Some(20));
        assert_eq!(minor_version("cargo-deny 1.3.0"), Some(u32::MAX));
        assert_eq!(minor_version("error: no such command"), None);
    }

    #[test]
    fn the_pinned_version_is_recent_enough() {
        assert!(minor_version(&format!("cargo-deny {VERSION}")).unwrap() >= OLDEST_MINOR);
    }
}
