//! `asan`: the tests of the crates with unsafe code under AddressSanitizer.

use anyhow::Result;

use crate::command::Tool;
use crate::commands::nixl::with_nixl_for;
use crate::commands::simulated;
use crate::commands::test::{PROPTEST_SEED, host_triple, run_counted};
use crate::tally::Tally;
use crate::tidy::has_unsafe_code;
use crate::workspace::Workspace;

/// The number of cases of a property test, unless `PROPTEST_CASES` is set. The sanitizer makes an
/// unoptimised test several times slower, and `test` runs the full number.
const PROPTEST_CASES: &str = "32";

/// The sizes of the longest tests, unless the variables are set, for the same reason.
const SIZES: [(&str, &str); 6] = [
    ("TERRANE_FORMAT_PAIRS", "4"),
    ("TERRANE_STORE_KILLS", "10"),
    ("TERRANE_STORE_STORE_KILLS", "4"),
    ("TERRANE_STORE_JOBS", "400"),
    ("TERRANE_STORE_OPERATIONS", "1000"),
    ("TERRANE_STORE_DAMAGES", "5000"),
];

/// The tests that also run over the simulated driver. In these tests, memory is shared with a
/// device, or transfers fail or are abandoned. Other tests mostly run code of the driver, which is
/// not instrumented.
const ON_DEVICE: [&str; 7] = [
    "background::",
    "device::",
    "engine::calls",
    "engine::faults",
    "managed::",
    "ordered::",
    "staging::",
];

/// Tests without unsafe code: those of the compiler's errors, and the longest ones of the store's
/// catalog. `test` runs them.
const SAFE: [&str; 2] = ["compile_fail", "disk::crash::"];

/// The simulated devices, with a random order of work from a fixed seed.
const DEVICES: &str = "devices=2,memory=8GiB,policy=random,seed=1";

/// Runs the unit and integration tests of each crate that contains unsafe code.
pub fn run(workspace: &Workspace, tally: &mut Tally) -> Result<()> {
    if !has_nightly(workspace) {
        tally.skip("asan", "no nightly toolchain");
        return Ok(());
    }
    let mut packages = Vec::new();
    for package in workspace.libraries() {
        if has_unsafe_code(package)? {
            packages.push(package);
        }
    }
    // The driver is not published, but all of these crates depend on it.
    packages.extend(workspace.member(simulated::DRIVER));
    let host = host_triple(workspace)?;
    // With an explicit target, the flags do not apply to build scripts and procedural macros. Leaks
    // are not reported, because tests leak completions on purpose to show that it is sound.
    let test = || -> Result<Tool> {
        let mut cargo = Tool::new(workspace, "rustup");
        for (variable, size) in SIZES {
            cargo = cargo.default_env(variable, size);
        }
        Ok(with_nixl_for(workspace, cargo, &packages)?
            .args(["run", "nightly", "cargo"])
            .without_env("CARGO")
            .env("RUSTFLAGS", "-Zsanitizer=address")
            .default_env("ASAN_OPTIONS", "detect_leaks=0")
            .default_env("PROPTEST_CASES", PROPTEST_CASES)
            .default_env("PROPTEST_RNG_SEED", PROPTEST_SEED)
            .env("CARGO_TARGET_DIR", workspace.target().join("asan"))
            .args(["test", "--all-features", "--no-fail-fast", "--target", &host])
            .args(packages.iter().flat_map(|package| ["--package", package.name.as_str()])))
    };
    let all = test()?
        .args(["--lib", "--tests", "--", "--show-output"])
        .args(SAFE.iter().flat_map(|tests| ["--skip", tests]));
    run_counted(workspace, all, "asan", tally)?;
    let on_device = simulated::over_driver(workspace, test()?, DEVICES)?
        .args(["--test", "gpu", "--", "--show-output", "--test-threads=1"])
        .args(ON_DEVICE);
    run_counted(workspace, on_device, "asan-simulated", tally)
}

/// Queries rustup for installed components, because `cargo +nightly` might start a download. A
/// dated toolchain has another name.
fn has_nightly(workspace: &Workspace) -> bool {
    Tool::new(workspace, "rustup")
        .args(["component", "list", "--installed", "--toolchain", "nightly"])
        .probe()
        .is_some()
}
