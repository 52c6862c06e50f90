//! `interop`: tensors and arrays handed both ways between Terrane and libraries from PyPI.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::commands::test::run_counted;
use crate::pypi;
use crate::tally::Tally;
use crate::workspace::{Workspace, crate_folder};

/// The crate that is the library with the C interface.
const CRATE: &str = "terrane-interop-proof";

/// The options of `cargo xtask interop`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Runs only tests whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

/// Builds the library, installs the other side, and runs the Python tests.
pub fn run(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    let package =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    let python = crate_folder(package).join("python");
    let site = provision(workspace, &python.join("requirements.txt"))?;
    Tool::cargo(workspace).args(["build", "--quiet", "--package", CRATE]).run()?;
    let library = workspace.target().join("debug/libterrane_interop_proof.so");
    let tests = Tool::new(workspace, "python3")
        .env("PYTHONPATH", &site)
        // Only what is committed lies beside the tests.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .arg(python.join("run.py"))
        .arg(&library)
        .args(&arguments.filter);
    run_counted(workspace, tests, "interop", tally)
}

/// The folder with what `requirements` names, installed if it is not there as named.
fn provision(workspace: &Workspace, requirements: &Path) -> Result<PathBuf> {
    let wanted = fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    let version = Tool::new(workspace, "python3")
        .args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        .stdout()
        .context("the other side of the proof is Python; this needs python3 with pip")?;
    // What is installed belongs to one version of Python.
    let wanted = format!("# Python {}\n{wanted}", version.trim());
    let folder = workspace.target().join("interop");
    pypi::whole(&folder, &wanted, |fresh| {
        println!("installing what the interop tests need to {}", folder.display());
        let site = fresh.join("site");
        let target = [Path::new("--target"), &site, Path::new("--requirement"), requirements];
        pypi::pip(workspace, "install", |pip| pip.args(target))?;
        if fs::read_dir(&site).is_ok_and(|mut entries| entries.next().is_none()) {
            bail!("pip installed nothing to {}", site.display());
        }
        Ok(())
    })
    .context("cannot install what the interop tests need")?;
    Ok(folder.join("site"))
}
