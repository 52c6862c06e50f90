//! The tests of NIXL with RDMA libraries from unpacked packages that are not installed.
//!
//! If such packages are installed, UCX loads them together with the libraries of NIXL's wheel. The
//! gate tests the state of the machine. This command tests the state with the packages.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::with_nixl;
use crate::command::Tool;
use crate::commands::peers::with_python;
use crate::commands::test::{PROPTEST_SEED, run_counted};
use crate::tally::Tally;
use crate::workspace::Workspace;

/// The crate whose tests use NIXL.
const CRATE: &str = "terrane-nixl";

/// The libraries of the packages that UCX loads, directly or indirectly.
const LIBRARIES: [&str; 4] =
    ["libefa.so.1", "libibverbs.so.1", "libnl-3.so.200", "libnl-route-3.so.200"];

/// The Debian packages with these libraries.
const PACKAGES: &str = "libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200";

/// Runs the tests of NIXL as if the unpacked packages in `packages` were installed.
pub fn test(workspace: &Workspace, packages: &Path, tally: &mut Tally) -> Result<()> {
    let packages = std::path::absolute(packages).context("the folder of packages has no path")?;
    let mut cargo = Tool::cargo(workspace).default_env("PROPTEST_RNG_SEED", PROPTEST_SEED);
    for folder in folders(&packages)? {
        cargo = cargo.library_path(&folder);
    }
    // NIXL's folder precedes the folders of the machine's libraries.
    let package = workspace.member(CRATE);
    let package = package.with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    let cargo = with_python(workspace, with_nixl(workspace, cargo)?, &[package])?
        .args(["test", "--package", CRATE, "--all-features", "--no-fail-fast"])
        .args(["--", "--show-output"]);
    run_counted(workspace, cargo, "nixl-with-verbs", tally)
}

/// Returns the folders below `packages` with the libraries.
fn folders(packages: &Path) -> Result<BTreeSet<PathBuf>> {
    let mut missing = BTreeSet::from(LIBRARIES);
    let (mut found, mut left) = (BTreeSet::new(), vec![packages.to_owned()]);
    while let Some(folder) = left.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                left.push(entry.path());
            } else if LIBRARIES.iter().any(|name| entry.file_name() == **name) {
                missing.remove(&*entry.file_name().to_string_lossy());
                found.insert(folder.clone());
            }
        }
    }
    if !missing.is_empty() {
        let missing = Vec::from_iter(missing).join(", ");
        bail!(
            "{} holds no {missing}; unpack the packages there: `apt-get download {PACKAGES}`, then \
             `dpkg -x` each",
            packages.display()
        );
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folders_of_the_libraries_are_found_and_missing_ones_are_named() {
        let packages = tempfile::tempdir().unwrap();
        let [first, second] = ["usr/lib/here", "lib/there"].map(|name| packages.path().join(name));
        fs::create_dir_all(&first).unwrap();
        fs::create_dir_all(&second).unwrap();
        for name in &LIBRARIES[..2] {
            fs::write(first.join(name), "").unwrap();
        }
        let missing = folders(packages.path()).unwrap_err().to_string();
        assert!(missing.contains("libnl-3.so.200, libnl-route-3.so.200"), "{missing}");
        assert!(!missing.contains("libefa"), "{missing}");
        for name in &LIBRARIES[2..] {
            fs::write(second.join(name), "").unwrap();
        }
        assert_eq!(folders(packages.path()).unwrap(), BTreeSet::from([first, second]));
    }
}
