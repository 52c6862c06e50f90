//! Tests of two processes: this one and a child of the same binary, which communicate over a
//! socket.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitStatus, Stdio};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use crate::process::{failure, is_child, quoted, rerun};

/// The time for which one process waits for a message of the other before the test fails.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Runs `here` in this process and `there` in a child, at the same time. Call it once, with the
/// whole test in the two closures. `test` is the test's path, `module::name`.
///
/// ```no_run
/// use terrane_testkit::peer::with_peer;
///
/// with_peer(
///     "echo::words_come_back",
///     |peer| {
///         peer.link().send(b"hello");
///         assert_eq!(peer.link().receive(), b"hello");
///     },
///     |link| {
///         let heard = link.receive();
///         link.send(&heard);
///     },
/// );
/// ```
///
/// # Panics
///
/// If either closure fails, with the child's output; if the test is not found; if one process waits
/// in vain for a message of the other.
#[track_caller]
pub fn with_peer(test: &str, here: impl FnOnce(&mut Peer), there: impl FnOnce(&mut Link)) {
    if is_child(test) {
        return there(&mut Link::inherited());
    }
    let mut peer = Peer::start(test);
    here(&mut peer);
    peer.finish(test);
}

/// The child.
///
/// Dropping it kills the child.
#[derive(Debug)]
pub struct Peer {
    link: Link,
    child: Child,
    /// Standard output and standard error.
    output: [Option<JoinHandle<String>>; 2],
    killed: bool,
}

impl Peer {
    /// The connection to it.
    pub fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    /// Kills it at once, and waits until it has ended.
    ///
    /// # Panics
    ///
    /// If it has ended by itself.
    #[track_caller]
    pub fn kill(&mut self) {
        let ended = self.child.try_wait().expect("a child can be waited for");
        assert!(
            ended.is_none(),
            "the peer has ended by itself: {ended:?}\n{}",
            quoted(&self.output()[1])
        );
        self.child.kill().expect("a child can be ended");
        self.child.wait().expect("a child can be waited for");
        self.killed = true;
    }

    #[track_caller]
    fn start(test: &str) -> Self {
        let (here, theirs) = UnixStream::pair().expect("a pair of sockets can be made");
        let mut child = rerun(test)
            // The child's connection to this process; the child reads no other input.
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the test binary can be started again");
        let output = [child.stdout.take().map(collect), child.stderr.take().map(collect)];
        Self { link: Link::over(here), child, output, killed: false }
    }

    #[track_caller]
    fn finish(mut self, test: &str) {
        if self.killed {
            return;
        }
        // The child need not wait for a message that never arrives; it may also have ended.
        let _: std::io::Result<()> = self.link.stream.shutdown(Shutdown::Write);
        let status = self.child.wait().expect("a child can be waited for");
        let [result, text] = self.output();
        let how = failure(&status, &result);
        assert!(status.success(), "{test} {how} in the peer: {status}\n{}", quoted(&text));
        // libtest succeeds if there is no test of this name.
        assert!(self.link.runs_test(), "{test} is not the path of a test");
    }

    /// The child's standard output and standard error, after it has ended.
    fn output(&mut self) -> [String; 2] {
        self.output.each_mut().map(|output| {
            let output = output.take().map(JoinHandle::join);
            output.and_then(Result::ok).unwrap_or_default()
        })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The child may have ended already, and a failed test need not wait for the rest.
        let _: std::io::Result<()> = self.child.kill();
        let _: std::io::Result<ExitStatus> = self.child.wait();
        let _: [String; 2] = self.output();
    }
}

/// One end of the connection between the two processes.
#[derive(Debug)]
pub struct Link {
    stream: UnixStream,
    heard: bool,
}

/// The first message of a child. It shows that the child runs the test.
const HELLO: &[u8] = b"terrane peer";

impl Link {
    /// Sends a message of any bytes.
    ///
    /// # Panics
    ///
    /// If the other process has ended.
    #[track_caller]
    pub fn send(&mut self, message: &[u8]) {
        let length =
            u64::try_from(message.len()).expect("a message's length is a number").to_le_bytes();
        let sent = self.stream.write_all(&length).and_then(|()| self.stream.write_all(message));
        sent.expect("the other process receives messages");
    }

    /// The next message of the other process.
    ///
    /// # Panics
    ///
    /// If it has ended, or sends nothing for two minutes.
    #[track_caller]
    pub fn receive(&mut self) -> Vec<u8> {
        self.receive_unless_gone().expect("the other process has ended, or closed its end")
    }

    /// The next message of the other process, or `None` if it has ended.
    ///
    /// # Panics
    ///
    /// If it sends nothing for two minutes.
    #[track_caller]
    pub fn receive_unless_gone(&mut self) -> Option<Vec<u8>> {
        if !std::mem::replace(&mut self.heard, true) {
            let hello = self.read_message()?;
            assert_eq!(hello, HELLO, "the other process is of the same test");
        }
        self.read_message()
    }

    #[track_caller]
    fn read_message(&mut self) -> Option<Vec<u8>> {
        let mut length = [0; 8];
        match self.stream.read_exact(&mut length) {
            Ok(()) => {}
            Err(error) if is_end(&error) => return None,
            Err(error) => panic!("the other process sends nothing: {error}"),
        }
        let length = usize::try_from(u64::from_le_bytes(length)).expect("a message fits in memory");
        let mut message = vec![0; length];
        match self.stream.read_exact(&mut message) {
            Ok(()) => Some(message),
            Err(error) if is_end(&error) => None,
            Err(error) => {
                panic!("the other process stopped in the middle of a message: {error}")
            }
        }
    }

    /// Whether the other process runs the test, which its first message states.
    #[track_caller]
    fn runs_test(&mut self) -> bool {
        self.heard || self.read_message().is_some_and(|message| message == HELLO)
    }

    fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(TIMEOUT)).expect("a socket takes a limit");
        Self { stream, heard: false }
    }

    fn inherited() -> Self {
        let input = std::io::stdin().as_fd().try_clone_to_owned();
        let mut link = Self::over(UnixStream::from(input.expect("a descriptor can be cloned")));
        link.send(HELLO);
        link.heard = true;
        link
    }
}

/// An ended process closes its socket, or resets it if it had not read everything.
fn is_end(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)
}

/// Reads all output of the child, so that it never waits for a reader.
#[track_caller]
fn collect(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    let read = move || {
        let mut bytes = Vec::new();
        // After an error, the bytes read so far are the output.
        let _: std::io::Result<usize> = from.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    };
    Builder::new().name(String::from("peer-output")).spawn(read).expect("a thread can be started")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_whole_and_in_order() {
        with_peer(
            "peer::tests::messages_arrive_whole_and_in_order",
            |peer| {
                let long = vec![7; 1 << 20];
                peer.link().send(b"");
                peer.link().send(&long);
                assert_eq!(peer.link().receive(), b"");
                assert_eq!(peer.link().receive(), long);
                assert_eq!(peer.link().receive_unless_gone(), None);
            },
            |link| {
                for _ in 0..2 {
                    let message = link.receive();
                    link.send(&message);
                }
            },
        );
    }

    #[test]
    fn a_peer_can_be_killed_at_any_point() {
        with_peer(
            "peer::tests::a_peer_can_be_killed_at_any_point",
            |peer| {
                assert_eq!(peer.link().receive(), b"ready");
                peer.kill();
                assert_eq!(peer.link().receive_unless_gone(), None);
            },
            |link| {
                link.send(b"ready");
                link.receive();
            },
        );
    }

    #[test]
    fn a_failure_in_the_child_fails_the_test() {
        const TEST: &str = "peer::tests::a_failure_in_the_child_fails_the_test";
        let there = |_: &mut Link| panic!("it went wrong");
        if is_child(TEST) {
            return with_peer(TEST, |_| (), there);
        }
        let outcome = std::panic::catch_unwind(|| with_peer(TEST, |_| (), there));
        let cause = outcome.unwrap_err();
        let text = cause.downcast_ref::<String>().unwrap();
        assert!(text.contains("it went wrong"), "{text}");
    }

    #[test]
    fn a_missing_test_is_a_failure() {
        let outcome = std::panic::catch_unwind(|| with_peer("peer::no_such", |_| (), |_| ()));
        let cause = outcome.unwrap_err();
        assert!(cause.downcast_ref::<String>().unwrap().contains("is not the path of a test"));
    }
}
