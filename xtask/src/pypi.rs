//! Libraries from their wheels on PyPI, checked by hash and stored under the target folder.
//!
//! A folder is complete or does not exist: it is created under another name, and renamed at the
//! end. A file in it lists its sources, so that a changed pin replaces the folder.

use std::env::consts::ARCH;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::workspace::Workspace;

/// The wheels to fetch, and the members to unpack.
#[derive(Debug)]
pub struct Wheels {
    /// The name for messages.
    pub name: &'static str,
    /// The requirements in pip's format. Each line has the hashes of the permitted wheels, one for
    /// x86-64 and one for aarch64.
    pub requirements: &'static str,
    /// The prefixes of the names of unpacked members.
    pub members: &'static [&'static str],
    /// Increased when `finish` changes, so that existing folders are replaced.
    pub revision: u32,
}

/// The file in each complete folder that lists its sources.
const STAMP: &str = "MADE-OF";

/// The Python version of the wheels. The unpacked files do not depend on Python, so any version may
/// be installed.
const PYTHON: &str = "3.12";

/// The versions of the C library that wheels may require, up to the newest required one.
const PLATFORMS: [&str; 5] =
    ["manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux2010"];

/// Unpacks the wheels to `folder` and calls `finish`.
///
/// Does nothing if the folder is complete. Concurrent processes wait for each other.
pub fn provide(
    workspace: &Workspace,
    wheels: &Wheels,
    folder: &Path,
    finish: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let Wheels { name, requirements, members, revision } = wheels;
    let members = members.join(" ");
    let stamp = format!("{requirements}members {members}\nrevision {revision} on {ARCH}\n");
    whole(folder, &stamp, |fresh| {
        // Standard output is reserved for the command.
        eprintln!("{name} is not there yet; fetching it from PyPI to {}", folder.display());
        unpack(workspace, wheels, fresh)?;
        finish(fresh)
    })
    .with_context(|| format!("cannot provide {name}"))
}

/// Calls `make` to fill a new folder, then adds the stamp and moves the folder to `folder`. Does
/// nothing if `folder` already has this stamp.
pub fn whole(folder: &Path, stamp: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let is_whole = || fs::read_to_string(folder.join(STAMP)).is_ok_and(|found| found == stamp);
    if is_whole() {
        return Ok(());
    }
    create(folder.parent().context("the path has no parent folder")?)?;
    let lock = sibling(folder, "lock");
    let locked =
        File::create(&lock).with_context(|| format!("cannot create {}", lock.display()))?;
    locked.lock().with_context(|| format!("cannot lock {}", lock.display()))?;
    if is_whole() {
        return Ok(()); // Another process has created it.
    }
    let fresh = sibling(folder, "new");
    remove(&fresh)?;
    create(&fresh)?;
    let stamped =
        || fs::write(fresh.join(STAMP), stamp).context("cannot write what it was made of");
    make(&fresh).and_then(|()| stamped()).inspect_err(|_| {
        // Frees disk space, which may have been the problem. Otherwise a later run removes the
        // folder.
        let _ = remove(&fresh);
    })?;
    remove(folder)?;
    fs::rename(&fresh, folder).with_context(|| format!("cannot put {}", folder.display()))
}

/// Fetches the wheels and unpacks the selected members into `folder`. pip checks the hashes.
fn unpack(workspace: &Workspace, wheels: &Wheels, folder: &Path) -> Result<()> {
    if !matches!(ARCH, "x86_64" | "aarch64") || cfg!(not(target_env = "gnu")) {
        bail!(
            "its wheels are for Linux with the GNU C library on x86_64 and aarch64, and this \
             machine is another ({ARCH}); install it by other means"
        );
    }
    let download = folder.join("download");
    create(&download)?;
    let requirements = download.join("requirements.txt");
    fs::write(&requirements, wheels.requirements)
        .with_context(|| format!("cannot write {}", requirements.display()))?;
    let platforms = PLATFORMS.map(|name| format!("{name}_{ARCH}"));
    pip(workspace, "download", |pip| {
        pip.args(["--require-hashes", "--python-version", PYTHON, "--implementation", "cp"])
            .args(platforms.iter().flat_map(|platform| ["--platform", platform]))
            .args([Path::new("--dest"), &download, Path::new("--requirement"), &requirements])
    })?;
    let script = workspace.root().join("xtask/src/unpack.py");
    let downloaded = fs::read_dir(&download).context("cannot list what was downloaded")?;
    for file in downloaded {
        let wheel = file.context("cannot list what was downloaded")?.path();
        if wheel.extension().is_some_and(|extension| extension == "whl") {
            Tool::new(workspace, "python3")
                .args([&script, &wheel, folder])
                .args(wheels.members)
                .run()?;
        }
    }
    remove(&download)
}

/// Runs a command of pip with binary wheels only, and explains its error.
pub fn pip(workspace: &Workspace, command: &str, with: impl FnOnce(Tool) -> Tool) -> Result<()> {
    let pip = Tool::new(workspace, "python3")
        .args(["-m", "pip", command, "--quiet", "--no-deps", "--only-binary=:all:"])
        .args(["--disable-pip-version-check", "--no-input"]);
    let stderr =
        with(pip).stderr_if_failed().context("python3 with pip is needed; install both")?;
    match stderr {
        Some(stderr) => bail!("{}\npip says:\n{}", meaning_and_remedy(&stderr), stderr.trim_end()),
        None => Ok(()),
    }
}

/// Returns the meaning of pip's error and the remedy.
fn meaning_and_remedy(stderr: &str) -> &'static str {
    let says = |words: &[&str]| words.iter().any(|word| stderr.contains(word));
    if says(&["No module named pip"]) {
        return "python3 has no pip; install it (`apt-get install python3-pip`, or `python3 -m \
                ensurepip`)";
    }
    if says(&["No space left on device"]) {
        return "a disk is full; make room where this was to go, and where temporary files go \
                (TMPDIR names another place)";
    }
    if says(&["DO NOT MATCH THE HASHES"]) {
        return "what was sent is not the wheel that is pinned, and nothing of it was kept; if pip \
                is configured to use a mirror or a proxy, see what that sends";
    }
    // Without a network, pip also reports that no version matches. Its earlier warnings differ.
    if says(&["Retrying (", "connection broken", "ConnectionError", "Max retries", "SSLError"]) {
        return "the package index cannot be reached; this needs the network once (pip's \
                configuration names a mirror or a proxy, if there is one)";
    }
    if says(&["No matching distribution", "Could not find a version"]) {
        return "the package index has no such wheel for this architecture; if pip is configured \
                to use a mirror, see whether that has it";
    }
    "pip failed"
}

/// Returns the path of a file or folder next to `folder`, with a suffix.
fn sibling(folder: &Path, suffix: &str) -> PathBuf {
    let mut name = folder.file_name().unwrap_or_default().to_owned();
    name.push(".");
    name.push(suffix);
    folder.with_file_name(name)
}

fn create(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_created_once() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("library");
        for (stamp, text, expected) in
            [("one", "first", "first"), ("one", "second", "first"), ("two", "third", "third")]
        {
            whole(&folder, stamp, |fresh| Ok(fs::write(fresh.join("file"), text)?)).unwrap();
            assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), expected);
        }
    }

    #[test]
    fn an_incomplete_folder_is_not_used() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("library");
        let error = whole(&folder, "one", |fresh| {
            fs::write(fresh.join("half"), "")?;
            bail!("the network is gone")
        });
        assert!(error.unwrap_err().to_string().contains("the network is gone"));
        assert!(!folder.exists() && !sibling(&folder, "new").exists());
        // A folder from another program, and an incomplete folder without a stamp.
        for left in [&folder, &sibling(&folder, "new")] {
            create(left).unwrap();
            fs::write(left.join("half"), "").unwrap();
        }
        whole(&folder, "one", |fresh| Ok(fs::write(fresh.join("all"), "")?)).unwrap();
        assert!(folder.join("all").exists() && !folder.join("half").exists());
        assert!(!sibling(&folder, "new").exists());
    }

    #[test]
    fn a_folder_is_unchanged_if_its_replacement_fails() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("library");
        whole(&folder, "one", |fresh| Ok(fs::write(fresh.join("file"), "")?)).unwrap();
        whole(&folder, "two", |_| bail!("no")).unwrap_err();
        whole(&folder, "one", |_| bail!("it is there")).unwrap();
    }

    #[test]
    fn concurrent_processes_create_it_one_at_a_time() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("library");
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    whole(&folder, "one", |_| {
                        made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        Ok(())
                    })
                    .unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }

    #[test]
    fn errors_of_pip_are_distinguished() {
        for (said, words) in [
            ("/usr/bin/python3: No module named pip", "has no pip"),
            (
                "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
                "not the wheel that is pinned",
            ),
            (
                "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by \
                 'NewConnectionError'\nERROR: No matching distribution found for a==1",
                "cannot be reached",
            ),
            (
                "ERROR: Could not find a version that satisfies the requirement a==1\nERROR: No \
                 matching distribution found for a==1",
                "no such wheel",
            ),
            ("OSError: [Errno 28] No space left on device: 'a' -> 'b'", "a disk is full"),
            ("Segmentation fault", "pip failed"),
        ] {
            assert!(meaning_and_remedy(said).contains(words), "{said}");
        }
    }
}
