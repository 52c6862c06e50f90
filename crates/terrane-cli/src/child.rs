//! Child processes that may crash or hang.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// The reason why a child process returned no result. The text follows the name of the child.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ChildFailure {
    /// It could not be started.
    NotStarted(String),
    /// It ran longer than the timeout, and was killed.
    TimedOut(Duration),
    /// It ended without success.
    Failed { how: String, last_line: String },
}

impl std::fmt::Display for ChildFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NotStarted(error) => write!(f, "could not be started: {error}"),
            Self::TimedOut(limit) => {
                write!(f, "hung: no answer in {} s", limit.as_secs_f64())
            }
            Self::Failed { how, last_line } if last_line.is_empty() => write!(f, "{how}"),
            Self::Failed { how, last_line } => write!(f, "{how}: {last_line}"),
        }
    }
}

/// Runs the command to its end, and returns its standard output. Then kills the processes that it
/// started and did not stop.
pub(crate) fn output_of(mut command: Command, timeout: Duration) -> Result<Vec<u8>, ChildFailure> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // The child and its descendants are in their own process group, so that they can be killed
    // together.
    command.process_group(0);
    let mut child = command.spawn().map_err(|error| ChildFailure::NotStarted(error.to_string()))?;
    let (out, error) = (child.stdout.take(), child.stderr.take());
    // Two threads read both pipes, because a child blocks on a full pipe.
    thread::scope(|scope| {
        let out = scope.spawn(move || read(out));
        let error = scope.spawn(move || read(error));
        let status = wait(&mut child, timeout);
        let (out, error) = (out.join().unwrap_or_default(), error.join().unwrap_or_default());
        match status {
            None => Err(ChildFailure::TimedOut(timeout)),
            Some(status) if status.success() => Ok(out),
            Some(status) => {
                let text = String::from_utf8_lossy(&error);
                let last_line = text.lines().last().unwrap_or_default().to_owned();
                Err(ChildFailure::Failed { how: how(status), last_line })
            }
        }
    })
}

fn read(pipe: Option<impl Read>) -> Vec<u8> {
    /// The maximum length of the output that is read.
    const MOST: u64 = 1 << 20;
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        // After an error, the bytes before it are used.
        let _ = pipe.take(MOST).read_to_end(&mut bytes);
    }
    bytes
}

/// Waits until the child ends. Then, or at the timeout, kills its group, because a remaining
/// process would keep the pipes open.
fn wait(child: &mut Child, timeout: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + timeout;
    let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let has_ended = loop {
        match group.map(has_ended) {
            Some(Ok(true)) => break true,
            Some(Ok(false)) if Instant::now() < deadline => thread::sleep(Duration::from_millis(2)),
            // If the wait fails, the status is unknown, and the result is discarded.
            Some(Ok(false) | Err(_)) | None => break false,
        }
    };
    // The child is not reaped yet, so no other group can have its number. The call fails if no
    // other process is left.
    let _ = group.map(|group| kill_process_group(group, Signal::KILL));
    let _ = child.kill();
    let status = child.wait().ok();
    status.filter(|_| has_ended)
}

/// Whether the child has ended. It is not reaped.
fn has_ended(child: Pid) -> rustix::io::Result<bool> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(child), options)?.is_some())
}

fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with status {code}"),
        (None, Some(signal)) => format!("crashed by signal {signal}"),
        (None, None) => "ended without a status".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, timeout: Duration) -> Result<Vec<u8>, ChildFailure> {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        output_of(command, timeout)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn an_answer_is_what_the_child_printed() {
        assert_eq!(shell("echo yes", LONG), Ok(b"yes\n".to_vec()));
        // More bytes than a pipe buffers.
        assert_eq!(shell("head -c 300000 /dev/zero", LONG).unwrap().len(), 300_000);
    }

    #[test]
    fn a_child_that_hangs_is_killed() {
        let begun = Instant::now();
        let limit = Duration::from_millis(50);
        assert_eq!(shell("exec sleep 600", limit), Err(ChildFailure::TimedOut(limit)));
        assert!(begun.elapsed() < LONG);
    }

    #[test]
    fn processes_that_a_child_leaves_behind_do_not_hold_the_answer() {
        let begun = Instant::now();
        assert_eq!(shell("sleep 600 & echo yes", LONG), Ok(b"yes\n".to_vec()));
        let limit = Duration::from_millis(50);
        assert_eq!(shell("sleep 600; echo no", limit), Err(ChildFailure::TimedOut(limit)));
        assert!(begun.elapsed() < LONG);
    }

    #[test]
    fn a_crash_and_a_failure_are_distinguished() {
        let crash = shell("kill -SEGV $$", LONG).unwrap_err().to_string();
        assert_eq!(crash, "crashed by signal 11");
        let failure = shell("echo no library >&2; exit 9", LONG).unwrap_err().to_string();
        assert_eq!(failure, "ended with status 9: no library");
        let missing = output_of(Command::new("/no/such/program"), LONG).unwrap_err();
        assert!(matches!(missing, ChildFailure::NotStarted(_)));
    }
}
