//! `doc`: the documentation of the workspace, without a single warning.

use anyhow::{Result, bail};
use cargo_metadata::Package;
use serde_json::Value;

use crate::command::Tool;
use crate::commands::nixl::{with_nixl, with_nixl_for};
use crate::workspace::Workspace;

/// The options of `cargo xtask doc`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Opens the pages in a browser afterwards
    #[arg(long)]
    open: bool,
}

/// Builds the pages of all members with all features. If docs.rs builds a crate with fewer
/// features, builds its pages with these features too.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<()> {
    for package in workspace.libraries() {
        let Some(features) = docs_rs(package)? else { continue };
        with_nixl_for(workspace, Tool::cargo(workspace), &[package])?
            .env("RUSTDOCFLAGS", "-D warnings")
            .args(["doc", "--no-deps", "--package", package.name.as_str(), "--features"])
            .arg(features.join(","))
            .run()?;
    }
    // Last, so that the pages with all features remain.
    with_nixl(workspace, Tool::cargo(workspace))?
        .env("RUSTDOCFLAGS", "-D warnings")
        .args(["doc", "--workspace", "--no-deps", "--all-features"])
        .args(arguments.open.then_some("--open"))
        .run()
}

/// Returns the features that docs.rs adds to the default ones; `None` for all features.
pub fn docs_rs(package: &Package) -> Result<Option<Vec<String>>> {
    features(&package.metadata["docs"]["rs"]).map_or_else(
        || bail!("{} has no `[package.metadata.docs.rs]` with features", package.name),
        Ok,
    )
}

/// Reads the table. Returns `None` if it has neither `all-features` nor `features`.
fn features(table: &Value) -> Option<Option<Vec<String>>> {
    if table["all-features"] == Value::Bool(true) {
        return Some(None);
    }
    let names = table["features"].as_array()?.iter();
    names.map(|name| name.as_str().map(String::from)).collect::<Option<_>>().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tables_name_all_features_or_some() {
        assert_eq!(features(&json!({ "all-features": true })), Some(None));
        let some = json!({ "features": ["a", "b"], "targets": [] });
        assert_eq!(features(&some), Some(Some(vec!["a".into(), "b".into()])));
        assert_eq!(features(&json!({ "all-features": false })), None);
        assert_eq!(features(&Value::Null), None);
    }
}
