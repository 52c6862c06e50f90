//! Runs the command.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_terrane");

pub fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

/// Standard output of a successful run. Each line has at most 80 columns.
pub fn text(arguments: &[&str]) -> String {
    let output = run(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{arguments:?}: {error}");
    let text = String::from_utf8(output.stdout).unwrap();
    for line in text.lines() {
        assert!(line.chars().count() <= 80, "{arguments:?} prints a long line: {line}");
        assert!(!line.contains('\u{1b}'), "{arguments:?} prints an escape sequence: {line}");
    }
    text
}

pub fn json(arguments: &[&str]) -> Value {
    let output = run(arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{arguments:?}: {e}; {error}"))
}

/// Standard error and the status of a failed run.
pub fn refused(arguments: &[&str]) -> (String, i32) {
    let output = run(arguments);
    (String::from_utf8(output.stderr).unwrap(), output.status.code().unwrap())
}

pub fn config() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../terrane-plan/src/data/models/llama-3.1-8b.json")
}
