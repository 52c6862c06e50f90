//! Processes that have used NIXL exit without an error, and write only their own output to standard
//! output.

use std::fs;
use std::mem::ManuallyDrop;
use std::process::Command;
use std::thread;

use terrane_core::{ByteCount, Capability, CapabilityStatus, Register};
use terrane_nixl::{BackendConfig, probe};
use terrane_testkit::process::{in_child, in_child_with, is_child};

use crate::support::{agent, compile, memory};

/// The number of processes that a test starts, and the number at a time.
const PROCESSES: usize = 100;
const AT_A_TIME: usize = 4;

/// The library that UCX's module for EFA loads from the machine, together with the machine's libnl.
const VERBS: &str = "libefa.so.1";

#[test]
fn processes_exit_without_an_error_if_the_machine_has_verbs() {
    const TEST: &str = "exits::processes_exit_without_an_error_if_the_machine_has_verbs";
    if !is_child(TEST) && !has_verbs() {
        let how = "`cargo xtask nixl --with-verbs DIR` runs this with unpacked packages";
        eprintln!("skipped: {TEST}: the machine has no {VERBS}; {how}");
        return;
    }
    hundred_processes(TEST, |modules| {
        // RDMA stays enabled: UCX has loaded its module for it.
        assert!(modules.contains("/libuct_ib.so"), "{modules}");
        assert!(modules.contains("/libibverbs.so.1"), "{modules}");
    });
}

#[test]
fn processes_exit_without_an_error_if_the_machine_has_no_verbs() {
    const TEST: &str = "exits::processes_exit_without_an_error_if_the_machine_has_no_verbs";
    if !is_child(TEST) && has_verbs() {
        eprintln!("skipped: {TEST}: the machine has {VERBS}, so every process loads it");
        return;
    }
    hundred_processes(TEST, |modules| assert!(modules.contains("/libuct_"), "{modules}"));
}

/// Starts processes that use UCX. Each one prints its loaded modules, and must exit without an error.
fn hundred_processes(test: &str, look: impl Fn(&str) + Sync) {
    let body = || {
        let agent = agent([BackendConfig::new("UCX")]);
        drop(agent.register(memory(ByteCount::kib(64))).unwrap());
        look(&fs::read_to_string("/proc/self/maps").unwrap());
    };
    if is_child(test) {
        return in_child(test, body);
    }
    thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| (0..PROCESSES / AT_A_TIME).for_each(|_| in_child(test, body)));
        }
    });
}

/// Whether the loader finds the machine's verbs.
fn has_verbs() -> bool {
    // SAFETY: a library of the machine, whose initialisers may run in any process.
    let library = unsafe { libloading::Library::new(VERBS) };
    // It is never unloaded, because entries that its initialisers make elsewhere are not removed.
    library.map(ManuallyDrop::new).is_ok()
}

#[test]
fn the_probe_keeps_the_machines_libnl_separate() {
    in_child("exits::the_probe_keeps_the_machines_libnl_separate", || {
        let found = probe().unwrap();
        let status = found.capabilities().status(&Capability::SeparateRdmaLibraries);
        assert_eq!(status, Some(&CapabilityStatus::Granted));
    });
}

#[test]
fn a_program_that_is_linked_with_another_libnl_gets_the_reason() {
    const TEST: &str = "exits::a_program_that_is_linked_with_another_libnl_gets_the_reason";
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libnl-route-3.so.200");
    if !is_child(TEST) {
        compile(&library, &["rtnl_tc_register"]);
    }
    in_child_with(TEST, &[("LD_PRELOAD", &library.display().to_string())], || {
        let found = probe().unwrap();
        let installation = found.library().parent().unwrap().parent().unwrap();
        let is_wheel = fs::read_dir(installation).unwrap().any(|entry| {
            entry.unwrap().path().extension().is_some_and(|extension| extension == "libs")
        });
        if !is_wheel {
            eprintln!("skipped: {TEST}: this NIXL is of no wheel, so it uses the machine's libnl");
            return;
        }
        let status = found.capabilities().status(&Capability::SeparateRdmaLibraries);
        assert!(matches!(status, Some(CapabilityStatus::Refused(_))), "{status:?}");
        let capabilities = found.capabilities().to_string();
        assert!(capabilities.contains("does not link or preload libnl-route-3"), "{capabilities}");
    });
}

#[test]
fn ucx_does_not_log_to_standard_output() {
    const TEST: &str = "exits::ucx_does_not_log_to_standard_output";
    const SAID: &str = "UCX  INFO";
    if is_child(TEST) {
        return in_child(TEST, || drop(agent([BackendConfig::new("UCX")])));
    }
    // The child is started here, because the test reads its standard output.
    let output = Command::new(std::env::current_exe().unwrap())
        .args([TEST, "--exact", "--nocapture", "--test-threads=1"])
        .envs([("TERRANE_TEST_IN_CHILD", TEST), ("UCX_LOG_LEVEL", "info")])
        .env_remove("UCX_LOG_FILE")
        .output()
        .unwrap();
    let [said, log] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(output.status.success() && said.contains("1 passed"), "{said}{log}");
    assert!(log.contains(SAID) && !said.contains(SAID), "{said}{log}");
}
