//! `python`: builds the wheel, tests it in fresh environments, and generates the tables of the
//! engines' interfaces.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::command::{MOST_SECONDS, Tool, environment};
use crate::commands::simulated;
use crate::commands::test::run_counted;
use crate::pypi;
use crate::site;
use crate::tally::Tally;
use crate::workspace::{Workspace, crate_folder};

/// The crate of the wheel.
const CRATE: &str = "terrane-python";

/// The versions of Python that are tested in addition to `python3`, the newest first.
const NEWER: [&str; 3] = ["3.14", "3.13", "3.12"];

/// Tests of a minute that run in the newest Python alone: growth is that of the extension.
const LONG: &str = "*/test_growth.py";

/// The maximum size of a published wheel.
const MOST_BYTES: u64 = 10 << 20;

/// The tests that the GPU bundle runs on a real device, and their helpers.
const ON_DEVICE: [&str; 13] = [
    "conftest.py",
    "report.py",
    "cuda_driver.py",
    "engines.py",
    "linker_pools.py",
    "test_device.py",
    "test_layers.py",
    "test_sglang_linker.py",
    "test_vllm_worker.py",
    "gpu/test_torch.py",
    "gpu/test_torch_layers.py",
    "gpu/test_torch_linker.py",
    "gpu/test_torch_worker.py",
];

/// The packages of the tests that run in any version of Python. NumPy is the machine's.
const PURE: [&str; 7] =
    ["pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments"];

/// The options of pytest for reports in the format of Rust's tests.
const REPORT: [&str; 5] = ["--report-lines", "-p", "no:cacheprovider", "-p", "no:terminal"];

/// The simulated devices of the tests. They run work as late as possible.
const DEVICE: &str = "devices=2,memory=2GiB,policy=lazy";

/// The options of `cargo xtask python`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Option<Action>,
    /// Runs only tests whose name contains this text
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Tests the published form of the wheel: optimised, for manylinux_2_28
    #[arg(long)]
    release: bool,
    /// Runs the engines' own tests with Terrane's classes instead of theirs
    ///
    /// Installs PyTorch and the other imports of the engines to `target/python/engines`, and
    /// removes them afterwards. The installation has 7 GB and takes some minutes. vLLM and LMCache
    /// share one environment, from wheels only. SGLang publishes no tests, so its result comes from
    /// the tests against its interface.
    #[arg(long)]
    engines: bool,
    /// After the tests of `--engines`: reads and writes chunks in a directory, with the engines'
    /// own backends as baselines
    #[arg(long, value_name = "DIRECTORY", requires = "engines")]
    bench: Option<PathBuf>,
    /// Keeps the environment of `--engines` for the next run
    #[arg(long, requires = "engines")]
    keep: bool,
}

#[derive(Debug, Clone, clap::Subcommand)]
enum Action {
    /// Generates the tables of the engines' interfaces from their published sources
    ///
    /// Downloads the sources that `signatures/sources.json` pins (about 260 MB) to `target/python`.
    Signatures {
        /// Compares the tables with the committed ones instead of writing them
        #[arg(long)]
        check: bool,
    },
    /// Builds the published form of the wheel: optimised, for manylinux_2_28, at most 10 MiB
    ///
    /// Zig, from PyPI, links it against the glibc of manylinux_2_28. maturin checks the symbols.
    /// Another architecture needs `rustup target add ARCHITECTURE-unknown-linux-gnu`.
    Wheel {
        /// x86_64 or aarch64 [default: this machine's]
        #[arg(long, value_name = "ARCHITECTURE")]
        target: Option<String>,
    },
    /// Collects the package, its tests that need a device, and pytest in a folder for a GPU machine
    ///
    /// On that machine, run `PYTHONPATH=site python3 -m pytest --report-lines -p no:terminal
    /// tests`. The GPU bundle has the same folder.
    Bundle {
        /// The folder; it must not exist [default: target/python/bundle]
        #[arg(long, value_name = "DIRECTORY")]
        output: Option<PathBuf>,
    },
}

/// Builds and tests the wheel, or generates the tables.
pub fn run(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    match &arguments.action {
        Some(Action::Signatures { check }) => signatures(workspace, *check),
        Some(Action::Wheel { target }) => {
            let target = target.as_deref().unwrap_or(std::env::consts::ARCH);
            published(workspace, target).map(drop)
        }
        Some(Action::Bundle { output }) => {
            let default = folder(workspace).join("bundle");
            if output.is_none() {
                remove(&default)?;
            }
            pack(workspace, output.as_ref().unwrap_or(&default))
        }
        None if arguments.engines => {
            let done = engines(workspace, arguments, tally);
            if !arguments.keep {
                remove(&folder(workspace).join("engines"))?;
            }
            done
        }
        None => test(workspace, arguments, tally),
    }
}

fn signatures(workspace: &Workspace, check: bool) -> Result<()> {
    let script = source(workspace)?.join("signatures/extract.py");
    let tool = Tool::new(workspace, "python3")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .arg(script)
        .args([Path::new("--sources"), &folder(workspace).join("sources")]);
    if check { tool.arg("--check").run() } else { tool.run() }
}

/// Builds the wheel and runs the tests with each Python, in fresh environments.
fn test(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    let wheel = wheel(workspace, arguments.release)?;
    let version = site::version(workspace)?;
    let mut pythons = vec![(version.clone(), PathBuf::from("python3"))];
    pythons.extend(newest(workspace).filter(|(newest, _)| *newest != version));
    let tested = pythons.last().map(|(version, _)| version.clone()).unwrap_or_default();
    if let [newest, ..] = NEWER
        && tested != newest
    {
        let reason = format!("Python {newest} is not installed; {tested} is the newest one here");
        tally.skip(&format!("python-{newest}"), &reason);
    }
    for (version, python) in pythons {
        let tests = environment_of(workspace, &version, &python, &wheel)?;
        let tests = simulated::over_driver(workspace, tests, DEVICE)?;
        let tests = match &arguments.filter {
            Some(text) => tests.args(["-k", text]),
            None if version == tested => tests,
            None => {
                let reason = format!("Python {tested} runs them");
                tally.skip(&format!("python-{version}: the tests of 10,000 rounds"), &reason);
                tests.args(["--ignore-glob", LONG])
            }
        };
        let tests = tests.within(MOST_SECONDS);
        run_counted(workspace, tests, &format!("python-{version}"), tally)?;
    }
    Ok(())
}

/// Runs the engines' own tests. Reuses their environment if it still exists.
fn engines(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    let wheel = wheel(workspace, arguments.release)?;
    let package = source(workspace)?;
    let requirements = package.join("requirements/engines.txt");
    let pinned = fs::read_to_string(&requirements).context("cannot read what the engines need")?;
    let home = folder(workspace).join("engines");
    let python = |arguments: &[&str]| {
        Tool::new(workspace, home.join("environment/bin/python")).args(arguments)
    };
    let installed = home.join("INSTALLED");
    if fs::read_to_string(&installed).ok().as_deref() != Some(&pinned) {
        remove(&home)?;
        let environment = home.join("environment");
        Tool::new(workspace, "python3").args(["-m", "venv"]).arg(environment).run()?;
        // Without compiling packages, and without a cache of several gigabytes.
        let wheels_only = ["--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check"];
        python(&["-m", "pip", "install", "--quiet", "--no-deps"])
            .args(wheels_only)
            .arg("--requirement")
            .arg(&requirements)
            .run()?;
        fs::write(&installed, &pinned).context("cannot write what was installed")?;
    }
    python(&["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"])
        .arg(&wheel)
        .run()?;
    let run = || {
        python(&[])
            .arg(package.join("engines/run.py"))
            .args([Path::new("--sources"), &folder(workspace).join("sources")])
            .args([Path::new("--work"), &home.join("work")])
    };
    run_counted(workspace, run(), "python-engines", tally)?;
    let Some(directory) = &arguments.bench else { return Ok(()) };
    // The modules of vLLM and SGLang are from their published sources.
    let modules = run().arg("--rivals").stdout()?;
    python(&["-m", "terrane_kv.bench", "--rivals"])
        .arg(directory)
        .env("PYTHONPATH", modules.trim())
        .run()
}

/// Copies the package, its tests that need a device, and pytest into a folder for a GPU machine.
pub fn pack(workspace: &Workspace, folder: &Path) -> Result<()> {
    let (site, tests) = (folder.join("site"), folder.join("tests"));
    let wheel = wheel(workspace, true)?;
    let package = source(workspace)?;
    let requirements = package.join("requirements/tests.txt");
    let libraries =
        libraries(workspace, &site::version(workspace)?, Path::new("python3"), &requirements)?;
    fs::create_dir_all(&tests).with_context(|| format!("cannot create {}", tests.display()))?;
    Tool::new(workspace, "python3")
        .args(["-m", "zipfile", "--extract"])
        .args([&wheel, &site])
        .run()?;
    let pure = PURE.iter().map(|name| libraries.join(name));
    Tool::new(workspace, "cp").arg("-r").args(pure).arg(&site).run()?;
    for file in ON_DEVICE {
        let name = Path::new(file).file_name().unwrap_or_default();
        let (from, to) = (package.join("tests").join(file), tests.join(name));
        fs::copy(&from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    // The tables of the engines' interfaces, which the tests read.
    Tool::new(workspace, "cp").arg("-r").args([&package.join("signatures"), folder]).run()
}

/// Builds the wheel for the tests or the published wheel, and returns its path.
fn wheel(workspace: &Workspace, is_release: bool) -> Result<PathBuf> {
    if is_release {
        return published(workspace, std::env::consts::ARCH);
    }
    maturin(workspace)?.args(["--compatibility", "linux"]).run()?;
    built(workspace)
}

/// Builds the published wheel for an architecture, and returns its path.
fn published(workspace: &Workspace, architecture: &str) -> Result<PathBuf> {
    let requirements = source(workspace)?.join("requirements/zig.txt");
    let zig = site::provide(workspace, &folder(workspace).join("zig"), &requirements)?;
    maturin(workspace)?
        .env("PYTHONPATH", &zig)
        .args(["--release", "--zig", "--compatibility", "manylinux_2_28"])
        .args(["--target", &format!("{architecture}-unknown-linux-gnu")])
        .run()?;
    let wheel = built(workspace)?;
    let bytes = fs::metadata(&wheel).context("maturin has written no wheel")?.len();
    println!("{}: {:.1} MiB", wheel.display(), bytes as f64 / f64::from(1 << 20));
    if bytes > MOST_BYTES {
        bail!("the wheel is larger than {} MiB", MOST_BYTES >> 20);
    }
    Ok(wheel)
}

/// Returns maturin with an empty output folder.
fn maturin(workspace: &Workspace) -> Result<Tool> {
    let package = source(workspace)?;
    let requirements = package.join("requirements/build.txt");
    let tools = site::provide(workspace, &folder(workspace).join("build"), &requirements)?;
    let wheels = folder(workspace).join("wheels");
    remove(&wheels)?;
    Ok(Tool::new(workspace, tools.join("bin/maturin"))
        .args(["build", "--quiet", "--locked"])
        .args([Path::new("--manifest-path"), &package.join("Cargo.toml")])
        .args([Path::new("--out"), &wheels]))
}

fn built(workspace: &Workspace) -> Result<PathBuf> {
    let wheels = folder(workspace).join("wheels");
    let entries = fs::read_dir(&wheels).context("maturin has written no wheel")?;
    let mut found = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let wheel = found.find(|path| path.extension().is_some_and(|extension| extension == "whl"));
    wheel.with_context(|| format!("maturin has written no wheel to {}", wheels.display()))
}

/// Installs the wheel in a fresh environment, and returns the command that runs its tests.
fn environment_of(
    workspace: &Workspace,
    version: &str,
    python: &Path,
    wheel: &Path,
) -> Result<Tool> {
    let package = source(workspace)?;
    let requirements = package.join("requirements/tests.txt");
    let libraries = libraries(workspace, version, python, &requirements)?;
    let home = folder(workspace).join(format!("environment-{version}"));
    remove(&home)?;
    let quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"];
    Tool::new(workspace, python).args(["-m", "venv", "--without-pip"]).arg(&home).run()?;
    let own = home.join("bin/python");
    Tool::new(workspace, python)
        .args([Path::new("-m"), Path::new("pip"), Path::new("--python"), &own])
        .arg("install")
        .args(quiet)
        .arg(wheel)
        .run()?;
    Ok(Tool::new(workspace, &own)
        .env("PYTHONPATH", &libraries)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .args(["-m", "pytest"])
        .args(REPORT)
        // These tests need PyTorch with CUDA, and the GPU bundle runs them.
        .args([Path::new("--ignore"), &package.join("tests/gpu"), &package.join("tests")]))
}

/// Returns the packages of the tests, installed once for each version of Python.
fn libraries(
    workspace: &Workspace,
    version: &str,
    python: &Path,
    requirements: &Path,
) -> Result<PathBuf> {
    if !site::is_pinned(version) {
        bail!("Python {version} was found; the wheels for the tests are pinned for 3.11 to 3.14");
    }
    let pinned = fs::read_to_string(requirements).context("cannot read what the tests need")?;
    let place = folder(workspace).join(format!("libraries-{version}"));
    pypi::whole(&place, &format!("# Python {version}\n{pinned}"), |fresh| {
        let target = [Path::new("--target"), &fresh.join("site")];
        Tool::new(workspace, python)
            .args(["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"])
            .args(["--only-binary=:all:", "--disable-pip-version-check", "--no-input"])
            .args(target)
            .args([Path::new("--requirement"), requirements])
            .run()
    })?;
    Ok(place.join("site"))
}

/// Returns the newest Python of this machine with pinned wheels, and its version.
fn newest(workspace: &Workspace) -> Option<(String, PathBuf)> {
    let home = environment("HOME").map(|home| PathBuf::from(home).join(".pyenv/versions"));
    let installed = home.and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten();
    let mut installed: Vec<PathBuf> =
        installed.filter_map(|entry| Some(entry.ok()?.path())).collect();
    installed.sort();
    NEWER.iter().find_map(|version| {
        let name = format!("python{version}");
        let newer = installed.iter().rev().map(|folder| folder.join("bin").join(&name));
        let mut candidates = std::iter::once(PathBuf::from(&name)).chain(newer);
        let python = candidates.find(|python| {
            // The program may belong to a version manager and fail.
            Tool::new(workspace, python).args(["-c", "import venv, pip"]).probe().is_some()
        })?;
        Some(((*version).to_owned(), python))
    })
}

/// The folder of the crate.
fn source(workspace: &Workspace) -> Result<PathBuf> {
    let package =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    Ok(crate_folder(package))
}

/// Returns the folder of all generated files.
fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target().join("python")
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wheel_of_the_tests_has_its_hash() {
        let workspace = Workspace::load().unwrap();
        let requirements = source(&workspace).unwrap().join("requirements/tests.txt");
        assert_eq!(site::tests::pinned(&requirements), 6);
    }
}
