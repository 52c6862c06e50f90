//! `interop`: tensors and arrays handed both ways between Terrane and libraries from PyPI.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::commands::simulated;
use crate::commands::test::run_counted;
use crate::pypi;
use crate::tally::Tally;
use crate::workspace::{Workspace, crate_folder};

/// The crate that is the library with the C interface.
pub const CRATE: &str = "terrane-interop-proof";

/// What cargo makes of it.
pub const LIBRARY: &str = "libterrane_interop_proof.so";

/// What runs where there is PyTorch with CUDA, and nothing else is installed.
pub const ON_DEVICE: [&str; 5] =
    ["run.py", "proof.py", "dlpack.py", "cache.py", "gpu/test_torch.py"];

/// The versions of Python whose wheels `requirements.txt` has the hashes of.
const PYTHONS: [&str; 4] = ["3.11", "3.12", "3.13", "3.14"];

/// What of the device is simulated, as no array library of the gate has one.
const DEVICE: &str = "devices=1,memory=8GiB,policy=random,seed=1";

/// The options of `cargo xtask interop`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Runs only tests whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

/// Builds the library, installs the other side, and runs the Python tests.
pub fn run(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    let python = python(workspace)?;
    let site = provision(workspace, &python.join("requirements.txt"))?;
    Tool::cargo(workspace).args(["build", "--quiet", "--package", CRATE]).run()?;
    let library = workspace.target().join("debug").join(LIBRARY);
    let tests = simulated::over_driver(workspace, Tool::new(workspace, "python3"), DEVICE)?
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

/// The folder of the Python tests.
pub fn python(workspace: &Workspace) -> Result<PathBuf> {
    let package =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    Ok(crate_folder(package).join("python"))
}

/// The folder with what `requirements` names, installed if it is not there as named.
fn provision(workspace: &Workspace, requirements: &Path) -> Result<PathBuf> {
    let wanted = fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    let version = Tool::new(workspace, "python3")
        .args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        .stdout()
        .context("the other side of the proof is Python; this needs python3 with pip")?;
    let version = version.trim();
    if !PYTHONS.contains(&version) {
        bail!(
            "python3 is version {version}; wheels for the interop tests are pinned for {}",
            PYTHONS.join(", ")
        );
    }
    // What is installed belongs to one version of Python.
    let wanted = format!("# Python {version}\n{wanted}");
    let folder = workspace.target().join("interop");
    pypi::whole(&folder, &wanted, |fresh| {
        println!("installing what the interop tests need to {}", folder.display());
        let site = fresh.join("site");
        let target = [Path::new("--target"), &site, Path::new("--requirement"), requirements];
        pypi::pip(workspace, "install", |pip| pip.arg("--require-hashes").args(target))?;
        if fs::read_dir(&site).is_ok_and(|mut entries| entries.next().is_none()) {
            bail!("pip installed nothing to {}", site.display());
        }
        Ok(())
    })
    .context("cannot install what the interop tests need")?;
    Ok(folder.join("site"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_has_its_hash() {
        let workspace = Workspace::load().unwrap();
        let requirements = python(&workspace).unwrap().join("requirements.txt");
        let text = fs::read_to_string(requirements).unwrap().replace("\\\n", "");
        let packages: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(packages.len(), 4);
        for package in packages {
            let hashes = package.matches("--hash=sha256:").count();
            // One for all, or one for each version of Python on each of two architectures.
            assert!(hashes == 1 || hashes == 2 * PYTHONS.len(), "{package}");
        }
    }
}
