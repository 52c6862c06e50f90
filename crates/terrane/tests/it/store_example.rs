//! The example `store`, as a user runs it.

use std::process::Command;

use serde_json::Value;

use crate::run;

#[test]
fn conversations_go_on_after_a_kill() {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(run::binary("store"))
        .args(["--json", "--sessions", "2", "--turns", "3", "--blocks", "2", "--shared", "2"])
        .args(["--host-blocks", "6", "--disk-blocks", "20", "--directory"])
        .arg(directory.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let half = |name: &str, field: &str| report[name][field].as_u64().unwrap();
    assert_eq!((half("first_half", "turns"), half("second_half", "turns")), (3, 3));
    assert!(report["recovered_blocks"].as_u64().unwrap() > 0, "{report}");
    for name in ["first_half", "second_half"] {
        let hits = half(name, "hits_host") + half(name, "hits_disk");
        assert!(hits > 0, "{report}");
        assert_eq!(half(name, "verified"), hits);
    }
}
