//! Tests that need a process to themselves, in which they may forbid system calls.

use std::process::Command;

/// Names the test that a child process was started for.
const VARIABLE: &str = "TERRANE_TEST_IN_CHILD";

/// Runs `body` in a process in which nothing else runs, so that it may count what the process
/// holds, set its limits, or forbid it system calls. To be called once, with all of a test in its
/// `body`; `test` is the test's path, `module::name`.
///
/// # Panics
///
/// If the test fails there, or is not found.
#[track_caller]
pub fn in_child(test: &str, body: impl FnOnce()) {
    in_child_with(test, &[], body);
}

/// As [`in_child`], in a process with these variables besides those of this one.
///
/// # Panics
///
/// As [`in_child`] does.
#[track_caller]
#[expect(clippy::print_stderr, reason = "what could not run is said on standard error")]
pub fn in_child_with(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if is_child(test) {
        return body();
    }
    let output = again(test)
        .envs(variables.iter().copied())
        .output()
        .expect("the test binary can be started again");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test} in a child: {}\n{text}", output.status);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("1 passed"), "{test} is not the path of a test: {stdout}");
    // What the child skipped is said here too.
    text.lines().filter(|line| line.starts_with("skipped: ")).for_each(|line| eprintln!("{line}"));
}

/// This test binary once more, for one test alone.
#[track_caller]
pub(crate) fn again(test: &str) -> Command {
    let binary = std::env::current_exe().expect("the path of the test binary");
    let mut command = Command::new(binary);
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(VARIABLE, test);
    command
}

/// Whether this process was started for `test`.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "tests find out in which process they run")]
pub fn is_child(test: &str) -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == *test)
}

/// Lets these system calls fail with `error` on this thread and those that it starts, for good, as
/// the profiles of containers do.
///
/// # Errors
///
/// What the system said, if it lets nobody forbid anything.
///
/// # Panics
///
/// If there are more than 200 calls.
pub fn forbid(calls: &[libc::c_long], error: libc::c_int) -> std::io::Result<()> {
    let code = |code: u32| u16::try_from(code).expect("a code of 16 bits");
    let statement = |operation, k, jt| libc::sock_filter { code: code(operation), jt, jf: 0, k };
    let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(error).expect("a positive number");
    // The number of the system call is the first word of what the filter sees.
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, call) in calls.iter().enumerate() {
        let number = u32::try_from(*call).expect("the number of a system call");
        let to_the_end = u8::try_from(calls.len() - index).expect("no more than 200 calls");
        filter.push(statement(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, number, to_the_end));
    }
    filter.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0));
    filter.push(statement(libc::BPF_RET | libc::BPF_K, refuse, 0));
    let length = u16::try_from(filter.len()).expect("a short filter");
    let program = libc::sock_fprog { len: length, filter: filter.as_mut_ptr() };
    let check = |result| if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) };
    // SAFETY: the call takes plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    // SAFETY: program and filter outlive the call, which copies them.
    check(unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_runs_elsewhere() {
        let mut ran = false;
        in_child("process::tests::the_body_runs_elsewhere", || ran = true);
        assert_eq!(ran, is_child("process::tests::the_body_runs_elsewhere"));
    }

    #[test]
    fn a_failure_there_is_a_failure_here() {
        let outcome = std::panic::catch_unwind(|| in_child("process::tests::no_such_test", || ()));
        assert!(outcome.is_err());
    }
}
