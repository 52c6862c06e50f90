//! The GPU suite and the calibration, without a driver and over the simulated driver. The suite
//! `nixl`, over the real library.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test unwraps expected values, and prints when it is skipped"
)]

#[cfg(feature = "nixl")]
mod nixl;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use terrane_bench::Record;

/// The folder two levels above the tests' binary: `target/debug`.
fn profile() -> PathBuf {
    let binary = std::env::current_exe().unwrap();
    binary.ancestors().nth(2).expect("target/PROFILE/deps/it-HASH").to_owned()
}

fn suite() -> Command {
    Command::new(env!("CARGO_BIN_EXE_gpu"))
}

/// The example `calibrate`, which cargo builds with the tests. If cargo built only some tests,
/// prints a line about it and returns `None`.
fn calibrate(test: &str) -> Option<Command> {
    let path = profile().join("examples/calibrate");
    if !path.is_file() {
        eprintln!("skipped: {test}: the example is not built; run all tests of the crate");
        return None;
    }
    Some(Command::new(path))
}

/// Sets the variables by which `command` finds the simulated driver. If the driver is not built,
/// prints a line about it and returns `None`.
fn on_simulated_device(test: &str, mut command: Command) -> Option<Command> {
    let folder = profile().parent().map(|target| target.join("simulated-cuda"))?;
    if !folder.join("libcuda.so.1").is_file() {
        eprintln!("skipped: {test}: the simulated driver is not built; `cargo xtask test` does so");
        return None;
    }
    command.env("LD_LIBRARY_PATH", folder);
    command.env("TERRANE_SIMULATED_CUDA", "devices=2,memory=4GiB,policy=eager");
    Some(command)
}

/// Hides all devices from `command`, even if there is a driver.
fn without_a_device(mut command: Command) -> Command {
    command.env("CUDA_VISIBLE_DEVICES", "").env_remove("LD_LIBRARY_PATH");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_owned()).unwrap()
}

fn succeeds(mut command: Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    output
}

#[test]
fn without_a_device_the_suite_prints_the_reason_and_measures_nothing() {
    let mut command = without_a_device(suite());
    command.arg("--check");
    let output = succeeds(command);
    let errors = text(&output.stderr);
    assert!(errors.starts_with("skipped: gpu/all cases: "), "{errors}");
    assert_eq!(text(&output.stdout), "");
}

#[test]
fn every_case_runs_over_the_simulated_driver() {
    let name = "every_case_runs_over_the_simulated_driver";
    let Some(mut command) = on_simulated_device(name, suite()) else { return };
    command.args(["--smoke", "--json"]);
    let output = succeeds(command);
    assert_eq!(text(&output.stderr), "", "nothing is skipped");
    let lines = text(&output.stdout);
    let records: Vec<Record> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for case in [
        "device to pinned",
        "pinned to device",
        "both sides scattered",
        "raw copy each",
        "raw batched copies",
        "raw kernel",
        "pinned, compared with the best raw method",
        "both sides scattered, compared with the best raw method",
        "both directions at once",
        "both directions at once, compared with kernels at once",
        "1 of 32 blocks",
        "8 of 32 blocks",
        "submit of 16 blocks",
        "submit of 16 blocks after an idle stream",
        "submit of 16 blocks by a thread that may have slept",
        "within the device, layer separate to block contiguous",
        "within the device, outer first to block first",
        "compared with today's pattern",
        "slowdown of a matrix product, device to pinned, staged",
        "of pinned memory up",
        "pool hit on a stream, 2 MiB",
        "hits that made no event",
        "from one device to another",
    ] {
        // The worst prediction names its case and has no baseline.
        let of_case = |record: &&Record| {
            record.case.contains(case) && !record.case.starts_with("predictions")
        };
        let found: Vec<&Record> = records.iter().filter(of_case).collect();
        assert!(!found.is_empty(), "nothing is measured of {case:?}:\n{lines}");
        for record in found {
            assert!(record.value.is_some_and(|value| value > 0.0), "{record:?}");
            assert!(record.ratio.is_some_and(|ratio| ratio > 0.0), "{record:?}");
        }
    }
    // A simulation has no time targets, but this case counts calls.
    let events = records.iter().filter(|record| record.case.ends_with("made no event"));
    events.for_each(|record| assert!(record.ok, "{record:?}"));
    let mut cases: Vec<&str> = records.iter().map(|record| record.case.as_str()).collect();
    cases.sort_unstable();
    assert!(cases.windows(2).all(|pair| pair[0] != pair[1]), "a case is reported twice: {cases:?}");
}

#[test]
fn a_calibration_needs_a_device() {
    let Some(command) = calibrate("a_calibration_needs_a_device") else { return };
    let output = without_a_device(command).output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{errors}");
    assert!(errors.starts_with("error: cannot calibrate: "), "{errors}");
}

#[test]
fn a_calibration_is_printed_and_saved() {
    let name = "a_calibration_is_printed_and_saved";
    let Some(command) = calibrate(name) else { return };
    let Some(mut command) = on_simulated_device(name, command) else { return };
    let directory = tempfile::tempdir().unwrap();
    let file: &Path = &directory.path().join("calibration.json");
    command.args(["--moved-mib", "1", "--output"]).arg(file);
    let printed = text(&succeeds(command).stdout);
    for said in ["| ToHost ", "| staged ", "direct kernel", "saved in "] {
        assert!(printed.contains(said), "{said:?} is not printed:\n{printed}");
    }
    let saved: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert!(saved.is_object(), "{saved}");
}
