//! Building, stripping and collecting what goes to a GPU machine.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cargo_metadata::{Artifact, Message, Package, Target};

use crate::command::Tool;
use crate::workspace::{Workspace, crate_folder};

/// What tests that need a GPU are called: `[[test]] name = "gpu"`.
const TESTS: &str = "gpu";

/// The crate, the flag and the name of each program beside the tests, and what the bundle calls it.
const PROGRAMS: [(&str, &str, &str, &str); 3] = [
    ("terrane-bench", "--bin", "gpu", "bench"),
    ("terrane-bench", "--example", "calibrate", "calibrate"),
    ("terrane", "--example", "offload", "offload"),
];

/// A bundle travels to machines over slow lines.
const MOST_BYTES: u64 = 60 << 20;

const RUN: &str = include_str!("run.sh");

/// Left in each bundle, so that only a bundle is ever replaced.
const MARK: &str = "VERSION";

/// Builds everything and collects it in `folder`.
pub fn make(workspace: &Workspace, folder: &Path) -> Result<()> {
    let mut files = built_tests(workspace)?;
    for (package, flag, name, called) in PROGRAMS {
        let artifacts = build(workspace, &["build", "--package", package, flag, name])?;
        let binary = executables(&artifacts).find(|(target, _)| target.name == name);
        let (_, binary) = binary.with_context(|| format!("`{package}` has no `{name}`"))?;
        files.push((PathBuf::from(called), binary));
    }
    clear(folder)?;
    fs::create_dir_all(folder.join("tests"))
        .with_context(|| format!("cannot create {}", folder.display()))?;
    write(&folder.join(MARK), &version(workspace))?;
    for (called, binary) in &files {
        let to = folder.join(called);
        // Backtraces keep the names of functions.
        Tool::new(workspace, "strip")
            .args(["--strip-debug", "-o"])
            .arg(&to)
            .arg(binary)
            .run()
            .context("cannot strip; install binutils")?;
    }
    collect_interop(workspace, folder)?;
    let run = folder.join("run.sh");
    write(&run, RUN)?;
    fs::set_permissions(&run, Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", run.display()))?;
    let bytes = size_of(folder)?;
    println!(
        "{}: {} programs, {:.1} MiB of {} at most",
        folder.display(),
        files.len(),
        bytes as f64 / f64::from(1 << 20),
        MOST_BYTES >> 20,
    );
    if bytes > MOST_BYTES {
        bail!("the bundle is larger than {} MiB", MOST_BYTES >> 20);
    }
    Ok(())
}

/// Every test binary called `gpu`, under the name of its crate.
fn built_tests(workspace: &Workspace) -> Result<Vec<(PathBuf, PathBuf)>> {
    let has_tests = |package: &&Package| {
        package.targets.iter().any(|target| target.is_test() && target.name == TESTS)
    };
    let packages: Vec<&Package> = workspace.members().into_iter().filter(has_tests).collect();
    if packages.is_empty() {
        bail!("no crate has a test `{TESTS}`");
    }
    let mut arguments = vec!["test", "--no-run", "--all-features", "--test", TESTS];
    for package in &packages {
        arguments.extend(["--package", package.name.as_str()]);
    }
    let artifacts = build(workspace, &arguments)?;
    let mut files = Vec::new();
    for package in packages {
        let mine = artifacts.iter().filter(|artifact| artifact.package_id == package.id);
        let binary = mine
            .filter(|artifact| artifact.target.name == TESTS)
            .find_map(|artifact| artifact.executable.clone())
            .with_context(|| format!("cargo built no test `{TESTS}` of `{}`", package.name))?;
        files.push((Path::new("tests").join(package.name.as_str()), binary.into()));
    }
    Ok(files)
}

/// The library of the interop tests, and those of them that need PyTorch with CUDA.
fn collect_interop(workspace: &Workspace, folder: &Path) -> Result<()> {
    const CRATE: &str = "terrane-interop-proof";
    let artifacts = build(workspace, &["build", "--package", CRATE])?;
    let library = artifacts
        .iter()
        .filter(|artifact| artifact.target.name == CRATE.replace('-', "_"))
        .find_map(|artifact| artifact.filenames.iter().find(|file| file.extension() == Some("so")))
        .with_context(|| format!("`{CRATE}` has no shared library"))?;
    let package =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    let python = crate_folder(package).join("python");
    let to = folder.join("interop");
    fs::create_dir_all(to.join("gpu"))
        .with_context(|| format!("cannot create {}", to.display()))?;
    Tool::new(workspace, "strip")
        .args(["--strip-debug", "-o"])
        .arg(to.join("library.so"))
        .arg(library)
        .run()
        .context("cannot strip; install binutils")?;
    let files = ["run.py", "proof.py", "dlpack.py", "cache.py", "gpu/test_torch.py"];
    for file in files {
        fs::copy(python.join(file), to.join(file))
            .with_context(|| format!("cannot copy {}", python.join(file).display()))?;
    }
    Ok(())
}

/// Runs cargo in release mode, and gives what it built.
fn build(workspace: &Workspace, arguments: &[&str]) -> Result<Vec<Artifact>> {
    let output = Tool::cargo(workspace)
        .args(arguments)
        .args(["--release", "--message-format", "json-render-diagnostics"])
        .stdout()?;
    let mut artifacts = Vec::new();
    for message in Message::parse_stream(output.as_bytes()) {
        if let Message::CompilerArtifact(artifact) = message.context("cargo's messages")? {
            artifacts.push(artifact);
        }
    }
    Ok(artifacts)
}

fn executables(artifacts: &[Artifact]) -> impl Iterator<Item = (&Target, PathBuf)> {
    artifacts.iter().filter_map(|artifact| {
        let binary = artifact.executable.clone()?;
        Some((&artifact.target, binary.into()))
    })
}

/// Makes room; a folder that is no bundle is left alone.
fn clear(folder: &Path) -> Result<()> {
    let mut entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => {
            return Err(error).with_context(|| format!("cannot read {}", folder.display()));
        }
    };
    if entries.next().is_some() && !folder.join(MARK).is_file() {
        bail!("{} is not empty, and no bundle; name another folder", folder.display());
    }
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// The commit that was built, where git knows it.
fn version(workspace: &Workspace) -> String {
    let described = Tool::new(workspace, "git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .probe()
        .unwrap_or_else(|| String::from("unknown commit"));
    format!("Terrane {}\n", described.trim())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn size_of(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { size_of(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}
