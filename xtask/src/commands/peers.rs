//! NIXL for Python, for tests with peers without Terrane.

use std::path::PathBuf;

use anyhow::{Context, Result};
use cargo_metadata::Package;

use crate::command::Tool;
use crate::site;
use crate::workspace::{Workspace, crate_folder};

/// The crate with these tests.
const CRATE: &str = "terrane-nixl";

/// The variable that names the folder of NIXL for Python. Without it, the tests are skipped.
const VARIABLE: &str = "TERRANE_TEST_PYTHON_SITE";

/// Sets the variable for the tests of `packages` that `tool` runs. Without NIXL for Python, they
/// are skipped.
pub fn with_python(workspace: &Workspace, tool: Tool, packages: &[&Package]) -> Result<Tool> {
    if !packages.iter().any(|package| package.name == CRATE) {
        return Ok(tool);
    }
    Ok(match python(workspace)? {
        Some(site) => tool.env(VARIABLE, &site),
        None => tool,
    })
}

/// Returns the folder of NIXL for Python, and installs it below `target/nixl-python` if necessary.
/// `None` if no wheels are pinned for this version of Python.
pub fn python(workspace: &Workspace) -> Result<Option<PathBuf>> {
    if !site::is_pinned(&site::version(workspace)?) {
        return Ok(None);
    }
    let folder = workspace.target().join("nixl-python");
    site::provide(workspace, &folder, &requirements(workspace)?).map(Some)
}

fn requirements(workspace: &Workspace) -> Result<PathBuf> {
    let package =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    Ok(crate_folder(package).join("tests/it/engine/python/requirements.txt"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_has_its_hash() {
        let workspace = Workspace::load().unwrap();
        assert_eq!(site::tests::pinned(&requirements(&workspace).unwrap()), 2);
    }
}
