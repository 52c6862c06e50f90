//! Python modules from PyPI for tests. Each set is in a separate folder under the target folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::pypi;
use crate::workspace::Workspace;

/// The versions of Python whose wheels are pinned.
const PYTHONS: [&str; 4] = ["3.11", "3.12", "3.13", "3.14"];

/// Returns the folder for `PYTHONPATH` with the packages of the file `requirements`. Installs it
/// below `folder` unless it already has these packages.
pub fn provide(workspace: &Workspace, folder: &Path, requirements: &Path) -> Result<PathBuf> {
    let version = version(workspace)?;
    if !is_pinned(&version) {
        bail!(
            "python3 is version {version}; the wheels for these tests are pinned for {}",
            PYTHONS.join(", ")
        );
    }
    install(workspace, folder, requirements, &version)
}

/// Does the same for a program whose wheel is for every version of Python.
pub fn provide_program(
    workspace: &Workspace,
    folder: &Path,
    requirements: &Path,
) -> Result<PathBuf> {
    install(workspace, folder, requirements, &version(workspace)?)
}

fn install(
    workspace: &Workspace,
    folder: &Path,
    requirements: &Path,
    version: &str,
) -> Result<PathBuf> {
    let requirements_text = fs::read_to_string(requirements)
        .with_context(|| format!("cannot read {}", requirements.display()))?;
    // The installed modules work with only one version of Python.
    let requirements_text = format!("# Python {version}\n{requirements_text}");
    pypi::whole(folder, &requirements_text, |fresh| {
        eprintln!("installing {} to {}", requirements.display(), folder.display());
        let site = fresh.join("site");
        let target = [Path::new("--target"), &site, Path::new("--requirement"), requirements];
        pypi::pip(workspace, "install", |pip| pip.arg("--require-hashes").args(target))?;
        if fs::read_dir(&site).is_ok_and(|mut entries| entries.next().is_none()) {
            bail!("pip installed nothing to {}", site.display());
        }
        Ok(())
    })
    .with_context(|| format!("cannot install {}", requirements.display()))?;
    Ok(folder.join("site"))
}

/// Returns the version of `python3`, in the format of `PYTHONS`.
pub fn version(workspace: &Workspace) -> Result<String> {
    let version = Tool::new(workspace, "python3")
        .args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        .stdout()
        .context("these tests need python3 with pip; install both")?;
    Ok(version.trim().to_owned())
}

/// Whether wheels are pinned for this version of Python.
pub fn is_pinned(version: &str) -> bool {
    PYTHONS.contains(&version)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Returns the number of packages that a file of requirements pins, each with the hashes of all
    /// permitted wheels.
    ///
    /// # Panics
    ///
    /// If a package has fewer hashes.
    pub fn pinned(requirements: &Path) -> usize {
        let text = fs::read_to_string(requirements).unwrap().replace("\\\n", "");
        let packages: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        for package in &packages {
            let hashes = package.matches("--hash=sha256:").count();
            // One wheel for all, or one for each version of Python on each of two architectures.
            assert!(hashes == 1 || hashes == 2 * PYTHONS.len(), "{package}");
        }
        packages.len()
    }
}
