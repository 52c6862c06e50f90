//! The tests that need a device, over the simulated driver.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, anyhow};
use cargo_metadata::Package;

use crate::command::Tool;
use crate::commands::nixl::with_nixl_for;
use crate::commands::test::run_counted;
use crate::tally::Tally;
use crate::workspace::Workspace;

/// The crate of the driver.
pub const DRIVER: &str = "terrane-simulated-cuda";

/// The crate that loads the driver.
const USER: &str = "terrane-cuda";

/// The name of tests that need a GPU: `[[test]] name = "gpu"`.
pub const GPU_TESTS: &str = "gpu";

/// The simulated devices, enough for every test that needs no real device.
pub const DEVICES: &str = "devices=2,memory=8GiB";

/// Whether tests of the crate can use the driver.
pub fn can_use(workspace: &Workspace, package: &Package) -> bool {
    package.name == USER || package.name == DRIVER || workspace.reaches(package, USER)
}

/// Runs every test binary called `gpu` twice over the simulated driver: with work in a random
/// order, and with all work as late as possible. `packages` and `filter` select tests as in `test`.
///
/// The seed is from `TERRANE_SIMULATED_SEED`, or the same every time. A fixed seed shows that a
/// failure comes from the current change. The command line of a failure includes the seed.
pub fn run(
    workspace: &Workspace,
    packages: &[String],
    filter: Option<&String>,
    tally: &mut Tally,
) -> Result<()> {
    let mut chosen = with_gpu_tests(workspace);
    chosen.retain(|package| {
        packages.is_empty() || packages.iter().any(|name| package.name == name.as_str())
    });
    if chosen.is_empty() {
        return Ok(());
    }
    let folder = build(workspace)?;
    let random = format!("{DEVICES},policy=random,seed={}", seed()?);
    let lazy = format!("{DEVICES},policy=lazy");
    let over_device = |settings: &str| -> Result<Tool> {
        let cargo = with_nixl_for(workspace, Tool::cargo(workspace), &chosen)?;
        println!("simulated device ({settings})");
        Ok(over(cargo, &folder, settings)
            .args(["test", "--all-features", "--no-fail-fast", "--test", GPU_TESTS])
            .args(selection(&chosen, packages))
            .arg("--")
            .args(filter)
            .args(["--show-output", "--test-threads=1"]))
    };
    let run = |log: &str, cargo: Tool| {
        let mut tally = Tally::default();
        let result = run_counted(workspace, cargo, log, &mut tally);
        (tally, result)
    };
    // Each runs one test at a time, on its own devices.
    let (random, lazy) = (over_device(&random)?, over_device(&lazy)?);
    let (drawn, late) = thread::scope(|scope| {
        let late = scope.spawn(|| run("test-lazy", lazy));
        (run("test-simulated", random), late.join())
    });
    let late = late.map_err(|_| anyhow!("the thread that reads the tests' output panicked"))?;
    for (counted, _) in [&drawn, &late] {
        tally.add(counted.clone());
    }
    drawn.1.and(late.1)
}

/// Selects the whole workspace unless `packages` names some, as in `test`. Another selection unites
/// other features, and cargo would compile these crates and their dependencies again.
fn selection<'a>(chosen: &[&'a Package], packages: &[String]) -> Vec<&'a str> {
    if packages.is_empty() {
        return vec!["--workspace"];
    }
    chosen.iter().flat_map(|package| ["--package", package.name.as_str()]).collect()
}

/// Builds the driver and copies it to a folder for the dynamic linker.
///
/// Other tests than those called `gpu` also use it there.
pub fn build(workspace: &Workspace) -> Result<PathBuf> {
    Tool::cargo(workspace).args(["build", "--quiet", "--package", DRIVER]).run()?;
    let folder = workspace.target().join("simulated-cuda");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    place(&workspace.target().join("debug/libterrane_simulated_cuda.so"), &folder)?;
    Ok(folder)
}

/// Copies the driver to `folder`, unless the same bytes are there.
///
/// A running test keeps the file that it has loaded under one name. If that file were replaced, a
/// library that opens the driver by its other name would get a second driver. That one knows no
/// context of the first one.
fn place(built: &Path, folder: &Path) -> Result<()> {
    // Two steps of the gate may do this at the same time.
    let lock = folder.join("lock");
    let lock = File::create(&lock).with_context(|| format!("cannot create {}", lock.display()))?;
    lock.lock().with_context(|| format!("cannot lock {}", folder.display()))?;
    // Other libraries first try the name without the number.
    let short = folder.join("libcuda.so");
    if let Err(error) = symlink("libcuda.so.1", &short)
        && error.kind() != ErrorKind::AlreadyExists
    {
        return Err(error).with_context(|| format!("cannot link {}", short.display()));
    }
    let bytes = fs::read(built).with_context(|| format!("cannot read {}", built.display()))?;
    let library = folder.join("libcuda.so.1");
    if fs::read(&library).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    // An atomic rename, because a running test may have mapped the file.
    let fresh = folder.join("libcuda.so.1.new");
    fs::write(&fresh, &bytes).with_context(|| format!("cannot write {}", fresh.display()))?;
    fs::rename(&fresh, &library).with_context(|| format!("cannot put {}", library.display()))
}

/// Builds the driver and sets the variables by which programs of `tool` find it.
pub fn over_driver(workspace: &Workspace, tool: Tool, settings: &str) -> Result<Tool> {
    Ok(over(tool, &build(workspace)?, settings))
}

fn over(tool: Tool, folder: &Path, settings: &str) -> Tool {
    tool.library_path(folder).env("TERRANE_SIMULATED_CUDA", settings)
}

/// Returns the crates with a test binary called `gpu`.
pub fn with_gpu_tests(workspace: &Workspace) -> Vec<&Package> {
    let mut members = workspace.members();
    members.retain(|package| {
        package.targets.iter().any(|target| target.is_test() && target.name == GPU_TESTS)
    });
    members
}

#[expect(clippy::disallowed_methods, reason = "the ban is for library crates; this is a tool")]
fn seed() -> Result<u64> {
    match std::env::var("TERRANE_SIMULATED_SEED") {
        Ok(seed) => seed.parse().context("TERRANE_SIMULATED_SEED is no number"),
        Err(_) => Ok(1),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_driver_is_replaced_only_by_another() {
        let folder = std::env::temp_dir().join(format!("terrane-place-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let (built, library) = (folder.join("built.so"), folder.join("libcuda.so.1"));
        let place_bytes = |bytes: &[u8]| {
            fs::write(&built, bytes).unwrap();
            place(&built, &folder).unwrap();
            assert_eq!(fs::read(folder.join("libcuda.so")).unwrap(), bytes);
            fs::metadata(&library).unwrap().ino()
        };
        let first = place_bytes(b"first");
        // The file is open, so its number is not used again.
        let _open = File::open(&library).unwrap();
        fs::remove_file(folder.join("libcuda.so")).unwrap();
        assert_eq!(place_bytes(b"first"), first, "a running test may have loaded it");
        assert_ne!(place_bytes(b"second"), first);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn crates_above_the_driver_can_use_it() {
        let workspace = Workspace::load().unwrap();
        let answers = |name| can_use(&workspace, workspace.member(name).unwrap());
        assert!(["terrane-cuda", "terrane-arrow", "terrane", DRIVER].into_iter().all(answers));
        assert!(!["terrane-core", "terrane-layout", "terrane-wire"].into_iter().any(answers));
        assert!(with_gpu_tests(&workspace).iter().all(|package| can_use(&workspace, package)));
    }
}
