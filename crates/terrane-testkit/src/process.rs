//! Tests that need a separate process, in which they may forbid system calls.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};

/// The variable that names the test for which a child process was started.
const VARIABLE: &str = "TERRANE_TEST_IN_CHILD";

/// The time in seconds after which a child counts as hung: less than a test binary may take.
const CHILD_SECONDS: libc::c_uint = 600;

/// Runs `body` in a child process that runs nothing else. It may count the resources of the
/// process, set its limits, or forbid system calls. Call it once, with the whole test in `body`.
/// `test` is the test's path, `module::name`.
///
/// # Panics
///
/// If the test fails in the child, is not found, or runs for 600 seconds; see [`allow_seconds`].
#[track_caller]
pub fn in_child(test: &str, body: impl FnOnce()) {
    in_child_with(test, &[], body);
}

/// Like [`in_child`], in a process with these variables in addition to those of this process.
///
/// # Panics
///
/// As for [`in_child`].
#[track_caller]
#[expect(clippy::print_stderr, reason = "skipped tests are reported on standard error")]
pub fn in_child_with(test: &str, variables: &[(&str, &str)], body: impl FnOnce()) {
    if is_child(test) {
        allow_seconds(CHILD_SECONDS);
        return body();
    }
    let output = rerun(test)
        .envs(variables.iter().copied())
        .output()
        .expect("the test binary can be started rerun");
    let text = String::from_utf8_lossy(&output.stderr);
    let stdout = String::from_utf8_lossy(&output.stdout);
    let how = failure(&output.status, &stdout);
    let status = output.status;
    assert!(status.success(), "{test} {how} in a child: {status}\n{}", quoted(&text));
    assert!(stdout.contains("1 passed"), "{test} is not the path of a test:\n{}", quoted(&stdout));
    // Tests that the child skipped are reported here too.
    text.lines().filter(|line| line.starts_with("skipped: ")).for_each(|line| eprintln!("{line}"));
}

/// Ends this process by a signal if it still runs after so many seconds from now, in place of an earlier
/// limit. A child process of a test calls it if it needs more time than others.
pub fn allow_seconds(seconds: u32) {
    // SAFETY: the call takes a number.
    unsafe { libc::alarm(seconds) };
}

/// The command for this test binary with only this test.
#[track_caller]
pub(crate) fn rerun(test: &str) -> Command {
    let binary = std::env::current_exe().expect("the path of the test binary");
    let mut command = Command::new(binary);
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(VARIABLE, test);
    command
}

/// Marks each line of a child's output. Otherwise a reader of the log would count libtest's result line of
/// the child as that of the test binary.
pub(crate) fn quoted(output: &str) -> String {
    output.lines().map(|line| format!("| {line}\n")).collect()
}

/// The way in which a child with this standard output failed: before libtest printed its result, or
/// after.
pub(crate) fn failure(status: &ExitStatus, stdout: &str) -> &'static str {
    match (status.signal(), stdout.contains("test result: ok.")) {
        (Some(libc::SIGALRM), false) => "hung",
        (Some(_), true) => "passed, and then the process crashed as it exited,",
        (None, true) => "passed, and then the process failed as it exited,",
        (Some(_), false) => "crashed",
        (None, false) => "failed",
    }
}

/// Whether this process was started for `test`.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "tests find out which process they run in")]
pub fn is_child(test: &str) -> bool {
    std::env::var_os(VARIABLE).is_some_and(|value| value == *test)
}

/// The time in seconds after which a forked process counts as hung.
const FORK_SECONDS: libc::c_uint = 60;

/// Runs `body` in a process that is forked from this one, and waits for that process.
///
/// The forked process has the memory of this one, and none of its other threads. Call it within
/// [`in_child`], so that no other test runs during the fork.
///
/// # Panics
///
/// If the process cannot be forked, or if `body` panics, aborts or hangs there.
#[track_caller]
#[expect(clippy::print_stderr, reason = "the forked process can only report its failure like this")]
pub fn in_fork(body: impl FnOnce()) {
    // SAFETY: the forked process only runs `body`, and exits by `_exit`. The C library keeps its
    // allocator usable there.
    let process = unsafe { libc::fork() };
    assert!(process >= 0, "fork: {}", std::io::Error::last_os_error());
    if process == 0 {
        allow_seconds(FORK_SECONDS);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        if outcome.is_err() {
            eprintln!("the forked process panicked");
        }
        // SAFETY: it ends the process at once, without the handlers of the parent.
        unsafe { libc::_exit(i32::from(outcome.is_err())) };
    }
    let mut status = 0;
    // SAFETY: the call writes the status, which outlives it.
    let waited = unsafe { libc::waitpid(process, &raw mut status, 0) };
    assert_eq!(waited, process, "waitpid: {}", std::io::Error::last_os_error());
    let signal = libc::WIFSIGNALED(status).then(|| libc::WTERMSIG(status));
    assert_ne!(signal, Some(libc::SIGALRM), "the forked process hung");
    assert_eq!(signal, None, "the forked process ended by a signal");
    assert_eq!(libc::WEXITSTATUS(status), 0, "the forked process failed");
}

/// Makes these system calls fail with `error` on this thread and the threads that it starts,
/// permanently, as container profiles do.
///
/// # Errors
///
/// The system's error, if it does not permit such filters.
///
/// # Panics
///
/// If there are more than 200 calls.
pub fn forbid(calls: &[libc::c_long], error: libc::c_int) -> std::io::Result<()> {
    filter(calls, error, 0)
}

/// Like [`forbid`], on every thread of the process, as a late sandbox does.
///
/// # Errors
///
/// As for [`forbid`].
///
/// # Panics
///
/// As for [`forbid`].
pub fn forbid_to_all_threads(calls: &[libc::c_long], error: libc::c_int) -> std::io::Result<()> {
    filter(calls, error, libc::SECCOMP_FILTER_FLAG_TSYNC)
}

fn filter(calls: &[libc::c_long], error: libc::c_int, flags: libc::c_ulong) -> std::io::Result<()> {
    let code = |code: u32| u16::try_from(code).expect("a code of 16 bits");
    let statement = |operation, k, jt| libc::sock_filter { code: code(operation), jt, jf: 0, k };
    let refuse = libc::SECCOMP_RET_ERRNO | u32::try_from(error).expect("a positive number");
    // The number of the system call is the first word of the filter's input.
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
    check(i64::from(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }))?;
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: program and filter outlive the call, which copies them.
    check(unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) })
}

#[cfg(test)]
mod tests {
    use terrane_core::OwnerProcess;

    use super::*;

    #[test]
    fn the_body_runs_in_a_child() {
        let mut ran = false;
        in_child("process::tests::the_body_runs_in_a_child", || ran = true);
        assert_eq!(ran, is_child("process::tests::the_body_runs_in_a_child"));
    }

    #[test]
    fn a_forked_process_does_not_own_earlier_values() {
        in_child("process::tests::a_forked_process_does_not_own_earlier_values", || {
            let owner = OwnerProcess::current();
            in_fork(|| {
                assert!(!owner.is_current());
                let forked = OwnerProcess::current();
                assert!(forked.is_current());
                in_fork(|| assert!(!owner.is_current() && !forked.is_current()));
            });
            assert!(owner.is_current());
            let failed = std::panic::catch_unwind(|| in_fork(|| panic!("as it should")));
            assert!(failed.is_err(), "a failure in the forked process is a failure here");
        });
    }

    #[test]
    fn a_crash_at_the_exit_differs_from_a_failed_test() {
        const TEST: &str = "process::tests::a_crash_at_the_exit_differs_from_a_failed_test";
        extern "C" fn crash() {
            std::process::abort();
        }
        let body = || {
            // SAFETY: the function has no parameters, and exists as long as the process.
            assert_eq!(unsafe { libc::atexit(crash) }, 0);
        };
        if is_child(TEST) {
            return in_child(TEST, body);
        }
        let cause = std::panic::catch_unwind(|| in_child(TEST, body)).unwrap_err();
        let text = cause.downcast_ref::<String>().unwrap();
        assert!(text.contains("passed, and then the process crashed as it exited"), "{text}");
        let hung = ExitStatus::from_raw(libc::SIGALRM);
        assert_eq!(failure(&hung, "running 1 test"), "hung");
        let crashed = ExitStatus::from_raw(libc::SIGSEGV);
        assert_eq!(failure(&crashed, "running 1 test"), "crashed");
        assert_eq!(failure(&ExitStatus::from_raw(101 << 8), "test result: FAILED."), "failed");
    }

    #[test]
    fn a_failure_in_the_child_fails_the_test() {
        let outcome = std::panic::catch_unwind(|| in_child("process::tests::no_such_test", || ()));
        assert!(outcome.is_err());
    }
}
