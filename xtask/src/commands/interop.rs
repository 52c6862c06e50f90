//! `interop`: tensors and arrays handed both ways between Terrane and libraries from PyPI.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::commands::test::run_counted;
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
        .arg(&library);
    let tests = match &arguments.filter {
        Some(text) => tests.args(["--filter", text]),
        None => tests,
    };
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
    let (site, stamp) = (folder.join("site"), folder.join("installed.txt"));
    if fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(site);
    }
    println!("installing what the interop tests need to {}", site.display());
    match fs::remove_dir_all(&site) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", site.display()));
        }
        _ => {}
    }
    fs::create_dir_all(&site).with_context(|| format!("cannot create {}", site.display()))?;
    Tool::new(workspace, "python3")
        .args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"])
        .args(["--disable-pip-version-check", "--no-input"])
        .arg("--target")
        .arg(&site)
        .arg("--requirement")
        .arg(requirements)
        .run()
        .context("the libraries come from PyPI; this needs python3 with pip, and the network")?;
    if fs::read_dir(&site).is_ok_and(|mut entries| entries.next().is_none()) {
        bail!("pip installed nothing to {}", site.display());
    }
    // Written last: what was interrupted is done again.
    fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
    Ok(site)
}
