//! `miri`: unit and integration tests under Miri, which detects undefined behaviour.

use anyhow::Result;

use crate::command::Tool;
use crate::commands::test::{PROPTEST_SEED, run_under_own_runner};
use crate::tally::Tally;
use crate::workspace::Workspace;

/// The crates and their tests. Miri is about a thousand times slower than native code. So the tests
/// need no device, no file and no second process.
const RUNS: [Run; 3] = [
    Run {
        log: "miri",
        arguments: &[
            "--package=terrane-core",
            "--package=terrane-layout",
            "--package=terrane-transfer",
            "--lib",
        ],
        tests: &[],
    },
    Run {
        log: "miri-pool",
        arguments: &["--package=terrane-pool", "--lib"],
        tests: &["adaptors::debug::guard", "managed::"],
    },
    Run {
        log: "miri-host-path",
        arguments: &["--package=terrane-transfer", "--test=it"],
        tests: &["completion::", "ownership::"],
    },
];

struct Run {
    log: &'static str,
    arguments: &'static [&'static str],
    /// Name filters; empty for all tests.
    tests: &'static [&'static str],
}

/// Miri's options. The tests read the clock, and leak completions on purpose to show that it is
/// sound.
const FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-ignore-leaks";

/// By default rustix makes system calls by assembly. With this flag it calls libc, which Miri
/// emulates.
const RUSTFLAGS: &str = "--cfg rustix_use_libc";

/// The number of cases of a property test, unless `PROPTEST_CASES` is set.
const PROPTEST_CASES: &str = "2";

/// Runs the tests above. Skips the step if Miri is not installed.
pub fn run(workspace: &Workspace, tally: &mut Tally) -> Result<()> {
    if !has_miri(workspace) {
        tally.skip("miri", "not installed: rustup component add miri rust-src --toolchain nightly");
        return Ok(());
    }
    for Run { log, arguments, tests } in &RUNS {
        let cargo = Tool::new(workspace, "rustup")
            .args(["run", "nightly", "cargo", "miri", "test", "--no-fail-fast"])
            .without_env("CARGO")
            .env("RUSTFLAGS", RUSTFLAGS)
            .default_env("MIRIFLAGS", FLAGS)
            .default_env("PROPTEST_CASES", PROPTEST_CASES)
            .default_env("PROPTEST_RNG_SEED", PROPTEST_SEED)
            .env("CARGO_TARGET_DIR", workspace.target().join("miri"))
            .args(*arguments)
            .args(["--", "--show-output"])
            .args(*tests);
        run_under_own_runner(workspace, cargo, log, tally)?;
    }
    Ok(())
}

/// Queries rustup for installed components, because `cargo +nightly` might start a download.
fn has_miri(workspace: &Workspace) -> bool {
    let installed = |component: &str| {
        Tool::new(workspace, "rustup")
            .args(["component", "list", "--installed", "--toolchain", "nightly"])
            .probe()
            .is_some_and(|list| list.lines().any(|line| line.starts_with(component)))
    };
    installed("miri") && installed("rust-src")
}
