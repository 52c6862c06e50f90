//! `interop`: tensors and arrays between Terrane and libraries from PyPI, in both directions.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::command::{MOST_SECONDS, Tool};
use crate::commands::simulated;
use crate::commands::test::run_counted;
use crate::site;
use crate::tally::Tally;
use crate::workspace::{Workspace, crate_folder};

/// The crate that builds the library with the C interface.
pub const CRATE: &str = "terrane-interop-proof";

/// The library that cargo builds.
pub const LIBRARY: &str = "libterrane_interop_proof.so";

/// The files that need only PyTorch with CUDA.
pub const ON_DEVICE: [&str; 4] = ["run.py", "proof.py", "dlpack.py", "gpu/test_torch.py"];

/// The simulated device, because no array library of the gate has one.
const DEVICE: &str = "devices=1,memory=8GiB,policy=random,seed=1";

/// The options of `cargo xtask interop`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Runs only tests whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

/// Builds the library, installs the Python packages, and runs the Python tests.
pub fn run(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    let python = python(workspace)?;
    let folder = workspace.target().join("interop");
    let site = site::provide(workspace, &folder, &python.join("requirements.txt"))?;
    Tool::cargo(workspace).args(["build", "--quiet", "--package", CRATE]).run()?;
    let library = workspace.target().join("debug").join(LIBRARY);
    let tests = simulated::over_driver(workspace, Tool::new(workspace, "python3"), DEVICE)?
        .env("PYTHONPATH", &site)
        // Python must not write bytecode next to committed tests.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .arg(python.join("run.py"))
        .arg(&library);
    let tests = match &arguments.filter {
        Some(text) => tests.args(["--filter", text]),
        None => tests,
    };
    run_counted(workspace, tests.within(MOST_SECONDS), "interop", tally)
}

/// The folder of the Python tests.
pub fn python(workspace: &Workspace) -> Result<PathBuf> {
    let package =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    Ok(crate_folder(package).join("python"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_has_its_hash() {
        let workspace = Workspace::load().unwrap();
        let requirements = python(&workspace).unwrap().join("requirements.txt");
        assert_eq!(site::tests::pinned(&requirements), 4);
    }
}
