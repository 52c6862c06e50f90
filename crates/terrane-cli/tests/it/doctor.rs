//! The findings of `doctor`, with limits that are really set.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use serde_json::Value;

use crate::support::{PROGRAM, json, refused, run, text};

fn find<'a>(report: &'a Value, key: &str) -> &'a Value {
    let findings = report["findings"].as_array().unwrap();
    findings.iter().find(|finding| finding["key"] == key).unwrap_or_else(|| panic!("{report:#}"))
}

#[test]
fn everything_is_granted_or_has_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let report = json(&["doctor", path, "--json"]);
    assert_eq!(report["schema"], "terrane.doctor/1");
    for finding in report["findings"].as_array().unwrap() {
        assert_eq!(finding["status"] == "granted", finding.get("remedy").is_none(), "{finding}");
        assert!(!finding["detail"].as_str().unwrap().is_empty(), "{finding}");
    }
    for key in [
        "gpu",
        "memory",
        "numa",
        "huge-pages",
        "memlock",
        "shm",
        "io_uring",
        "registered-buffers",
        "direct-io",
        "unnamed-file",
        "preallocation",
        "nixl",
        "cufile",
    ] {
        find(&report, key);
    }
    assert!(text(&["doctor", path]).contains("in all"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    // Without a driver and NIXL, the probes take less than a fifth of a second.
    if report["driver_start_seconds"].is_null() && report["nixl_start_seconds"].is_null() {
        // Other tests run at the same time, so one fast try of many is sufficient.
        let seconds = || json(&["doctor", path, "--json"])["seconds"].as_f64().unwrap();
        assert!((0..50).any(|_| seconds() < 0.2));
    }
}

#[test]
fn a_limit_of_locked_memory_is_reported() {
    let script = format!("ulimit -l 64 && exec {PROGRAM} doctor --json --require memlock");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = find(&report, "memlock");
    assert_eq!(
        (&finding["status"], &finding["detail"]),
        (&"partial".into(), &"64 KiB for a process".into())
    );
    assert!(finding["remedy"].as_str().unwrap().contains("ulimit -l unlimited"));
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(error, "terrane: required and not granted: memlock\n");
    // Root is exempt from the limit.
    let finding = find(&report, "registered-buffers");
    if finding["status"] == "refused" && finding["detail"].as_str().unwrap().contains("register") {
        assert!(finding["remedy"].as_str().unwrap().contains("ulimit -l unlimited"), "{finding}");
    }
}

/// A filter that refuses `io_uring_setup`, like the default profile of containers.
fn refuse_io_uring() -> io::Result<()> {
    const IO_URING_SETUP: u32 = 425;
    let statement = |code: u32, k: u32, jump: (u8, u8)| libc::sock_filter {
        code: u16::try_from(code).unwrap_or(0),
        jt: jump.0,
        jf: jump.1,
        k,
    };
    let errno = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::EPERM).unwrap_or(1);
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, (0, 0)),
        statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, IO_URING_SETUP, (0, 1)),
        statement(libc::BPF_RET | libc::BPF_K, errno, (0, 0)),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, (0, 0)),
    ];
    let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
    // SAFETY: the call sets a flag of this process and takes no pointer.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the program and its filter live until the call has returned, and the kernel copies
    // them.
    if unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) }
        != 0
    {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[test]
fn a_filter_of_system_calls_that_refuses_io_uring_is_reported() {
    let mut command = Command::new(PROGRAM);
    command.args(["doctor", "--json"]);
    // SAFETY: the function makes two system calls and allocates nothing.
    unsafe { command.pre_exec(refuse_io_uring) };
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => {
            return eprintln!(
                "skipped: a_filter_of_system_calls_that_refuses_io_uring_is_reported: {error}"
            );
        }
    };
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = find(&report, "io_uring");
    assert_eq!(finding["status"], "refused", "{finding}");
    assert!(finding["detail"].as_str().unwrap().contains("io_uring_setup"), "{finding}");
    assert!(finding["remedy"].as_str().unwrap().contains("seccomp profile"));
}

#[test]
fn directories_that_cannot_be_used_say_why() {
    for (path, reason) in
        [("/no/such", "does not exist"), ("/proc", "/proc"), ("/etc/hostname", "/etc/hostname")]
    {
        let report = json(&["doctor", path, "--json"]);
        let finding = find(&report, "directory");
        assert_eq!(finding["status"], "refused", "{finding}");
        assert!(finding["detail"].as_str().unwrap().contains(reason), "{finding}");
    }
}

#[test]
fn a_directory_that_cannot_be_used_fails_each_requirement_of_directories() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    for key in ["direct-io", "unnamed-file", "preallocation"] {
        let (error, status) = refused(&["doctor", path, "/no/such", "--require", key]);
        let expected = format!("terrane: required and not granted: {key}\n");
        assert_eq!((error, status), (expected, 3));
    }
}

#[test]
fn a_closed_pipe_keeps_the_status_of_a_requirement() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    // Without a directory, there is no finding about direct I/O.
    let mut command = Command::new(PROGRAM);
    let output =
        command.args(["doctor", "--require", "direct-io"]).stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn a_missing_library_is_reported_with_its_name() {
    let report = json(&["doctor", "--json"]);
    let gpu = find(&report, "gpu");
    if gpu["status"] == "granted" {
        return eprintln!(
            "skipped: a_missing_library_is_reported_with_its_name: there is a driver"
        );
    }
    assert!(gpu["detail"].as_str().unwrap().contains("libcuda.so.1"), "{gpu}");
    let (error, status) = refused(&["doctor", "--require", "gpu,kernels"]);
    assert_eq!((error.as_str(), status), ("terrane: required and not granted: gpu, kernels\n", 3));
    if cfg!(not(feature = "nixl")) {
        assert_eq!(find(&report, "nixl")["detail"], "built without NIXL");
    }
}

#[test]
fn a_measured_machine_predicts_its_own_copies() {
    let folder = tempfile::tempdir().unwrap();
    let (path, file) = (folder.path().to_str().unwrap(), folder.path().join("machine.json"));
    let file = file.to_str().unwrap();
    let report =
        json(&["doctor", path, "--measure", "--size", "32MiB", "--machine-file", file, "--json"]);
    let measured = report["measured"].as_array().unwrap();
    let rate = |key: &str| {
        measured.iter().find(|row| row["key"] == key).unwrap()["bytes_per_second"].as_f64().unwrap()
    };
    assert!(rate("memory-copy") > 1e6 && rate("disk-read") > 1e6);
    let disk = format!("{path}:4GiB");
    let plan = json(&[
        "plan",
        "llama-3.1-8b",
        "--host",
        "1GiB",
        "--disk",
        &disk,
        "--machine",
        file,
        "--json",
    ]);
    let predictions = plan["predictions"].as_array().unwrap();
    let chunk = predictions.iter().find(|p| p["what"] == "a chunk, disk to host").unwrap();
    assert_eq!(chunk["is_measured"], true);
    let at_least = chunk["bytes"].as_f64().unwrap() / rate("disk-read");
    assert!(chunk["seconds"].as_f64().unwrap() >= at_least * 0.999);
    assert!(run(&["plan", "llama-3.1-8b", "--machine", file]).status.success());
}
