//! Runs examples as a user does.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The binary of the example `offload`.
pub fn example() -> &'static Path {
    static EXAMPLE: OnceLock<PathBuf> = OnceLock::new();
    EXAMPLE.get_or_init(|| binary("offload"))
}

/// The binary of an example.
///
/// `cargo test` builds examples with the tests. If only some tests are built, the example is
/// missing, so this function builds it, unless an earlier build has left it.
pub fn binary(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).expect("target/PROFILE/deps/it-HASH");
    let beside = profile.join("examples").join(example);
    if beside.is_file() {
        return beside;
    }
    let target = profile.join("examples-for-tests");
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--package", "terrane", "--example", example])
        .arg("--target-dir")
        .arg(&target)
        .status()
        .unwrap();
    assert!(status.success(), "the example does not build");
    target.join("debug/examples").join(example)
}

/// The command of the example with these arguments.
pub fn offload(arguments: &[&str]) -> Command {
    let mut command = Command::new(example());
    command.args(arguments);
    command
}

/// The command of the example with these arguments and the simulated driver instead of CUDA's.
/// `None`, with a printed skip, if the simulated driver is not built.
pub fn on_simulated_device(test: &str, arguments: &[&str]) -> Option<Command> {
    let binary = std::env::current_exe().unwrap();
    let target = binary.ancestors().nth(3).expect("target/PROFILE/deps/it-HASH");
    let folder = target.join("simulated-cuda");
    if !folder.join("libcuda.so.1").is_file() {
        eprintln!(
            "skipped: {test}: the simulated driver is not built; `cargo xtask test` builds it"
        );
        return None;
    }
    let mut command = offload(arguments);
    command.env("LD_LIBRARY_PATH", folder);
    Some(command)
}

/// The command of the example on a machine whose linker finds no driver.
pub fn without_a_driver(arguments: &[&str]) -> Command {
    let mut command = offload(arguments);
    // Hide all devices even if a driver is found.
    command.env("CUDA_VISIBLE_DEVICES", "").env_remove("LD_LIBRARY_PATH");
    command
}

/// The output of a run with these arguments.
pub fn output(arguments: &[&str]) -> Output {
    offload(arguments).output().unwrap()
}

/// Standard error as text.
pub fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The files of a directory.
pub fn files(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect()
}
