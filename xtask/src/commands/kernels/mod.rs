//! `kernels`: compiles CUDA C to the committed PTX, without a GPU and without the CUDA toolkit.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::kernels::{check_stamp, stamped};
use crate::pypi::{self, Wheels};
use crate::tidy;
use crate::workspace::Workspace;

/// The actions on the kernels.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// Compiles every `.cu` file to a `.ptx` file in the same folder
    ///
    /// NVRTC is from its package on PyPI (23 MB, checked by hash) and is stored under
    /// `target/tools`. The command needs `python3` with pip on x86-64, and no GPU. The same source
    /// always compiles to the same file.
    Build,
    /// Checks that every `.ptx` file was compiled from the `.cu` file in its folder; needs no
    /// compiler
    Check,
}

/// The version of NVRTC's package.
///
/// The oldest version of CUDA 12, because a driver loads the PTX of its own and of older versions.
const NVRTC: &str = "12.0.140";

/// The package, with the hash of its only wheel, which is for x86-64.
const WHEELS: Wheels = Wheels {
    name: "NVRTC",
    requirements: "nvidia-cuda-nvrtc-cu12==12.0.140 \
        --hash=sha256:8e94e991d85c422de4da87bdc7472fdc1364367bd4aace7000b559cd33122071\n",
    members: &["nvidia/cuda_nvrtc/lib/"],
    revision: 1,
};

/// The oldest architecture that the kernels support. They run on all newer ones.
const ARCHITECTURE: &str = "compute_80";

/// Builds or checks.
pub fn run(workspace: &Workspace, action: &Action) -> Result<()> {
    let sources = tidy::kernel_sources(workspace)?;
    if sources.is_empty() {
        bail!("the workspace has no `.cu` file");
    }
    match action {
        Action::Build => {
            let library = provision(workspace)?;
            sources.iter().try_for_each(|source| build(workspace, &library, source))
        }
        Action::Check => sources.iter().try_for_each(|source| check(source)),
    }
}

fn build(workspace: &Workspace, library: &Path, source: &Path) -> Result<()> {
    let script = workspace.root().join("xtask/src/commands/kernels/nvrtc.py");
    let ptx = Tool::new(workspace, "python3")
        .arg(script)
        .args([library, source])
        .arg(ARCHITECTURE)
        .stdout()?;
    let ptx = without_unused(&ptx);
    let name = source.file_name().unwrap_or_default().to_string_lossy();
    let compiler = format!("NVRTC {NVRTC} for {ARCHITECTURE}");
    let to = source.with_extension("ptx");
    fs::write(&to, stamped(&name, &read(source)?, &compiler, &ptx))
        .with_context(|| format!("cannot write {}", to.display()))?;
    println!("{}", to.display());
    Ok(())
}

/// Removes the unused constants of `nv/target`, which this release of NVRTC adds to every file.
fn without_unused(ptx: &str) -> String {
    let is_used = |line: &&str| !(line.starts_with(".global") && line.contains("nv6target"));
    ptx.lines().filter(is_used).flat_map(|line| [line, "\n"]).collect()
}

fn check(source: &Path) -> Result<()> {
    if let Err(reason) = check_stamp(&read(source)?, &read(&source.with_extension("ptx"))?) {
        bail!("{}: {reason}", source.display());
    }
    println!("{}: its PTX was made of it", source.display());
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns the library, and fetches it if necessary.
fn provision(workspace: &Workspace) -> Result<PathBuf> {
    let folder = workspace.target().join("tools").join(format!("nvrtc-{NVRTC}"));
    pypi::provide(workspace, &WHEELS, &folder, |_| Ok(()))?;
    let library = folder.join("nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
    if !library.exists() {
        bail!("the package of NVRTC {NVRTC} holds no {}", library.display());
    }
    Ok(library)
}
