//! Tests that need a device, with the simulated driver; and drivers that crash, hang or are
//! invalid.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::PROGRAM;

/// The folder of the simulated driver. `None`, with a printed skip, if it is not built.
fn simulated(test: &str) -> Option<PathBuf> {
    let binary = std::env::current_exe().unwrap();
    let folder = binary.ancestors().nth(3).unwrap().join("simulated-cuda");
    if !folder.join("libcuda.so.1").is_file() {
        eprintln!("skipped: {test}: the simulated driver is not built; `cargo xtask test` does so");
        return None;
    }
    Some(folder)
}

fn run(driver: &Path, arguments: &[&str]) -> Output {
    Command::new(PROGRAM)
        .args(arguments)
        .env("LD_LIBRARY_PATH", driver)
        .env("TERRANE_SIMULATED_CUDA", "devices=2,memory=4GiB,policy=eager")
        .output()
        .unwrap()
}

fn json(driver: &Path, arguments: &[&str]) -> Value {
    let output = run(driver, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn find<'a>(report: &'a Value, key: &str) -> Vec<&'a Value> {
    report["findings"].as_array().unwrap().iter().filter(|finding| finding["key"] == key).collect()
}

#[test]
fn devices_are_described_and_measured() {
    let Some(driver) = simulated("devices_are_described_and_measured") else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("machine.json");
    let file = file.to_str().unwrap();
    let arguments = [
        "doctor",
        "--measure",
        "--size",
        "4MiB",
        "--json",
        "--require",
        "gpu,pinned",
        "--machine-file",
        file,
    ];
    let report = json(&driver, &arguments);
    assert_eq!(find(&report, "gpu").len(), 1);
    for key in ["device", "pcie", "kernels", "pinned"] {
        assert_eq!(find(&report, key).len(), 2, "{key}: {report:#}");
    }
    assert!(report["driver_start_seconds"].as_f64().unwrap() > 0.0);
    let measured = report["measured"].as_array().unwrap();
    for key in ["to-host", "to-device", "both-ways", "pinned-bring-up"] {
        let row = measured.iter().find(|row| row["key"] == key).unwrap();
        assert!(row["bytes_per_second"].as_f64().unwrap() > 0.0, "{row}");
    }
    let arguments = [
        "plan",
        "llama-3.1-8b",
        "--gpu-mem",
        "1GiB",
        "--host",
        "1GiB",
        "--machine",
        file,
        "--json",
    ];
    let plan = json(&driver, &arguments);
    let predictions = plan["predictions"].as_array().unwrap();
    assert!(predictions.iter().any(|p| p["what"] == "a chunk, device to host"), "{predictions:?}");
}

#[test]
fn this_machine_has_the_memory_of_its_device() {
    let Some(driver) = simulated("this_machine_has_the_memory_of_its_device") else { return };
    let plan = json(&driver, &["plan", "llama-3.1-8b", "--gpu-mem", "5GiB", "--here", "--json"]);
    let limit = &plan["limits"][0];
    assert_eq!(
        (&limit["limit"], &limit["available"]),
        (&"device memory".into(), &(4_u64 << 30).into())
    );
}

#[test]
fn every_mover_has_a_measured_limit() {
    let Some(driver) = simulated("every_mover_has_a_measured_limit") else { return };
    for suite in ["gpu", "movers"] {
        let arguments =
            ["bench", suite, "llama-3.2-1b", "--size", "4MiB", "--passes", "1", "--json"];
        let report = json(&driver, &arguments);
        let cases = report["cases"].as_array().unwrap();
        assert!(cases.len() >= 5, "{report:#}");
        assert!(cases.iter().all(|case| case["ratio"].as_f64().unwrap() > 0.0), "{report:#}");
        crate::schemas::check("bench", &report);
    }
}

#[test]
fn pytorch_that_cannot_run_is_a_case_with_its_reason() {
    let test = "pytorch_that_cannot_run_is_a_case_with_its_reason";
    let Some(driver) = simulated(test) else { return };
    let movers = ["bench", "movers", "llama-3.2-1b", "--size", "4MiB", "--passes", "1"];
    let missing = |python: &str| {
        let report = json(&driver, &[&movers[..], &["--json", "--python", python]].concat());
        assert!(!report["cases"].to_string().contains("PyTorch"), "{report:#}");
        let missing = report["not_measured"].as_array().unwrap().clone();
        let case = missing.iter().find(|case| case["case"] == "full attention: PyTorch");
        case.unwrap_or_else(|| panic!("{report:#}"))["reason"].as_str().unwrap().to_owned()
    };
    assert!(missing("/no/such/python").contains("could not be started"));
    // Python without PyTorch, or PyTorch without a device: the simulated driver lacks functions
    // that PyTorch needs.
    let reason = missing("python3");
    assert!(!reason.is_empty() && !reason.contains('\n'), "{reason}");
    let output = run(&driver, &[&movers[..], &["--python", "/no/such/python"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("not measured: full attention: PyTorch: /no/such/python"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn an_error_that_is_not_a_missing_path_ends_the_suite_of_movers() {
    let test = "an_error_that_is_not_a_missing_path_ends_the_suite_of_movers";
    let Some(driver) = simulated(test) else { return };
    let movers = ["bench", "movers", "llama-3.2-1b", "--size", "4MiB", "--passes", "1", "--json"];
    // The blocks and the buffers of the limit need 16 MiB.
    let output = Command::new(PROGRAM)
        .args(movers)
        .env("LD_LIBRARY_PATH", driver)
        .env("TERRANE_SIMULATED_CUDA", "devices=1,memory=12MiB")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &[][..]), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.contains("memory"), "{error}");
}

/// A library named `libcuda.so.1` whose constructor runs this statement; `None` without a C
/// compiler.
fn library(folder: &Path, statement: &str) -> Option<()> {
    let mut compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-x", "c", "-", "-o"])
        .arg(folder.join("libcuda.so.1"))
        .stdin(Stdio::piped())
        .spawn()
        .ok()?;
    let source = format!(
        "#include <stdlib.h>\n#include <unistd.h>\n__attribute__((constructor)) static void start(void) {{ {statement} }}\n"
    );
    compiler.stdin.take()?.write_all(source.as_bytes()).ok()?;
    compiler.wait().ok()?.success().then_some(())
}

#[test]
fn a_driver_that_crashes_or_hangs_is_a_finding() {
    let test = "a_driver_that_crashes_or_hangs_is_a_finding";
    let folder = tempfile::tempdir().unwrap();
    for (statement, expected) in [
        ("abort();", "the probe crashed by signal 6"),
        ("for (;;) pause();", "the probe hung: no answer in 5 s"),
    ] {
        if library(folder.path(), statement).is_none() {
            return eprintln!("skipped: {test}: no C compiler");
        }
        let begun = Instant::now();
        let report = json(folder.path(), &["doctor", "--json"]);
        assert!(begun.elapsed() < Duration::from_secs(60));
        let gpu = find(&report, "gpu");
        assert_eq!(gpu[0]["detail"], expected);
        // The other probes ran.
        assert_eq!(find(&report, "memory")[0]["status"], "granted");
    }
}

#[test]
fn a_file_that_is_no_driver_is_a_finding() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("libcuda.so.1"), "no library").unwrap();
    let report = json(folder.path(), &["doctor", "--json"]);
    let gpu = find(&report, "gpu")[0];
    assert_eq!(gpu["status"], "refused");
    assert!(gpu["detail"].as_str().unwrap().contains("libcuda.so.1"), "{gpu}");
}
