//! Builds, strips and collects the files for a GPU machine.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cargo_metadata::{Artifact, Message, Target};

use crate::command::Tool;
use crate::commands::interop;
use crate::commands::nixl::{self, with_nixl};
use crate::commands::python;
use crate::commands::simulated::{GPU_TESTS, with_gpu_tests};
use crate::workspace::Workspace;

/// The crate, the cargo flag and the name of each program, and its name in the bundle.
const PROGRAMS: [(&str, &str, &str, &str); 7] = [
    ("terrane-bench", "--bin", "gpu", "bench"),
    ("terrane-bench", "--bin", "nixl", "bench-nixl"),
    ("terrane-bench", "--example", "calibrate", "calibrate"),
    ("terrane-cuda", "--example", "kernel_rates", "kernel-rates"),
    ("terrane", "--example", "offload", "offload"),
    ("terrane", "--example", "remote", "remote"),
    ("terrane-cli", "--bin", "terrane", "terrane"),
];

/// The maximum size of a packed bundle, because it is copied over slow connections.
const MOST_PACKED_BYTES: u64 = 48 << 20;

const RUN: &str = include_str!("run.sh");

/// The file that marks a folder as a bundle, so that only bundles are ever replaced.
const MARK: &str = "VERSION";

/// Builds everything and collects it in `folder`.
pub fn make(workspace: &Workspace, folder: &Path) -> Result<()> {
    let mut files = built_tests(workspace)?;
    for (package, flag, name, called) in PROGRAMS {
        let artifacts =
            build(workspace, &["build", "--all-features", "--package", package, flag, name])?;
        let binary = executables(&artifacts).find(|(target, _)| target.name == name);
        let (_, binary) = binary.with_context(|| format!("`{package}` has no `{name}`"))?;
        files.push((PathBuf::from(called), binary));
    }
    clear(folder)?;
    fs::create_dir_all(folder.join("tests"))
        .with_context(|| format!("cannot create {}", folder.display()))?;
    write(&folder.join(MARK), &version(workspace))?;
    for (called, binary) in &files {
        // Backtraces keep the names of functions.
        strip(workspace, "--strip-debug", binary, &folder.join(called))?;
    }
    pack_interop(workspace, folder)?;
    pack_python(workspace, folder)?;
    pack_nixl(workspace, folder)?;
    let run = folder.join("run.sh");
    write(&run, RUN)?;
    fs::set_permissions(&run, Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", run.display()))?;
    let packed = pack(workspace, folder)?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let bytes =
        fs::metadata(&packed).with_context(|| format!("cannot read {}", packed.display()))?.len();
    println!(
        "{}: {} programs, {:.1} MiB\n{}: the same packed, {:.1} MiB of {} at most",
        folder.display(),
        files.len(),
        mib(size_of(folder)?),
        packed.display(),
        mib(bytes),
        MOST_PACKED_BYTES >> 20,
    );
    if bytes > MOST_PACKED_BYTES {
        bail!("the packed bundle is larger than {} MiB", MOST_PACKED_BYTES >> 20);
    }
    Ok(())
}

/// Packs the folder into one file of the target folder, under the name `gpu-bundle`.
fn pack(workspace: &Workspace, folder: &Path) -> Result<PathBuf> {
    let packed = workspace.target().join("gpu-bundle.tar.gz");
    Tool::new(workspace, "tar")
        .args([Path::new("-czf"), &packed, Path::new("-C"), folder])
        .args(["--transform=s,^[.],gpu-bundle,", "."])
        .run()?;
    Ok(packed)
}

/// Copies the library of the interop tests into the folder, and the tests that need PyTorch with
/// CUDA.
fn pack_interop(workspace: &Workspace, folder: &Path) -> Result<()> {
    let artifacts = build(workspace, &["build", "--package", interop::CRATE])?;
    let mut files = artifacts.iter().flat_map(|artifact| &artifact.filenames);
    let library = files
        .find(|file| file.file_name() == Some(interop::LIBRARY))
        .with_context(|| format!("cargo built no {}", interop::LIBRARY))?;
    let python = interop::python(workspace)?;
    let to = folder.join("interop");
    fs::create_dir_all(to.join("gpu"))
        .with_context(|| format!("cannot create {}", to.display()))?;
    strip(workspace, "--strip-debug", library.as_std_path(), &to.join("library.so"))?;
    for file in interop::ON_DEVICE {
        fs::copy(python.join(file), to.join(file))
            .with_context(|| format!("cannot copy {}", python.join(file).display()))?;
    }
    Ok(())
}

/// Copies the Python package, its tests and pytest into the folder as `python.tar.gz`, which
/// `run.sh` unpacks. The archive is a quarter of their size.
fn pack_python(workspace: &Workspace, folder: &Path) -> Result<()> {
    let stage = workspace.target().join("python-bundle");
    if stage.exists() {
        fs::remove_dir_all(&stage).with_context(|| format!("cannot remove {}", stage.display()))?;
    }
    python::pack(workspace, &stage)?;
    Tool::new(workspace, "tar")
        .args([Path::new("-czf"), &folder.join("python.tar.gz"), Path::new("-C"), &stage])
        .args(["--exclude=__pycache__", "."])
        .run()?;
    fs::remove_dir_all(&stage).with_context(|| format!("cannot remove {}", stage.display()))
}

/// Copies NIXL into the folder as `nixl.tar.gz`, which `run.sh` unpacks. It includes the plugins
/// for memory and files, and UCX without the modules for networks that the test machines lack. The
/// archive is a sixth of the size.
fn pack_nixl(workspace: &Workspace, folder: &Path) -> Result<()> {
    let nixl = nixl::provide(workspace)?;
    let stage = workspace.target().join("nixl-bundle");
    if stage.exists() {
        fs::remove_dir_all(&stage).with_context(|| format!("cannot remove {}", stage.display()))?;
    }
    let wanted = |module: &str| nixl::is_transport(module) && !module.starts_with("libuct_ib");
    for library in nixl.loaded(workspace, wanted)? {
        let name = library
            .strip_prefix(nixl.folder())
            .context("a library is outside the folder of NIXL")?;
        let to = stage.join(name);
        let parent = to.parent().unwrap_or(&stage);
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        strip(workspace, "--strip-unneeded", &library, &to)?;
    }
    let (release, to) = (nixl.folder().join(nixl::RELEASE), stage.join(nixl::RELEASE));
    fs::create_dir_all(to.parent().unwrap_or(&stage))
        .and_then(|()| fs::copy(&release, &to))
        .with_context(|| format!("cannot copy {}", release.display()))?;
    Tool::new(workspace, "tar")
        .args([Path::new("-czf"), &folder.join("nixl.tar.gz"), Path::new("-C"), &stage])
        .arg(".")
        .run()?;
    fs::remove_dir_all(&stage).with_context(|| format!("cannot remove {}", stage.display()))
}

fn strip(workspace: &Workspace, how: &str, from: &Path, to: &Path) -> Result<()> {
    Tool::new(workspace, "strip")
        .arg(how)
        .args([Path::new("-o"), to, from])
        .run()
        .context("cannot strip; install binutils")
}

/// Returns every test binary called `gpu`, under the name of its crate.
fn built_tests(workspace: &Workspace) -> Result<Vec<(PathBuf, PathBuf)>> {
    let packages = with_gpu_tests(workspace);
    if packages.is_empty() {
        bail!("no crate has a test `{GPU_TESTS}`");
    }
    let mut arguments = vec!["test", "--no-run", "--all-features", "--test", GPU_TESTS];
    for package in &packages {
        arguments.extend(["--package", package.name.as_str()]);
    }
    let artifacts = build(workspace, &arguments)?;
    let mut files = Vec::new();
    for package in packages {
        let mine = artifacts.iter().filter(|artifact| artifact.package_id == package.id);
        let binary = mine
            .filter(|artifact| artifact.target.name == GPU_TESTS)
            .find_map(|artifact| artifact.executable.clone())
            .with_context(|| format!("cargo built no test `{GPU_TESTS}` of `{}`", package.name))?;
        files.push((Path::new("tests").join(package.name.as_str()), binary.into()));
    }
    Ok(files)
}

/// Runs cargo in release mode, and returns the built artifacts.
fn build(workspace: &Workspace, arguments: &[&str]) -> Result<Vec<Artifact>> {
    let output = with_nixl(workspace, Tool::cargo(workspace))?
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

/// Removes the folder. Fails if it is not empty and not a bundle.
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

/// Returns the commit of the build, if git knows it.
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
