//! A peer in a child process of the same test, which can be stopped and killed.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use terrane_nixl::{AgentBuilder, NixlEngineOptions, RemoteLayout};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::process::{in_child_with, is_child};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::support::*;

/// The time limit of steps that should take no time.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// A child process of this test, in which the test is the peer.
pub struct PeerProcess {
    pub child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl PeerProcess {
    pub fn start(test: &str) -> Self {
        Self::start_as(test, AgentBuilder::unnamed().name().as_str())
    }

    /// With an agent of this name.
    pub fn start_as(test: &str, name: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads=1"])
            .env("TERRANE_TEST_IN_CHILD", peer_of(test))
            .env("TERRANE_NIXL_AGENT", name)
            .env("TERRANE_NIXL_BACKENDS", "UCX")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        let line = format!("@{}\n", hexadecimal(bytes));
        self.child.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    }

    pub fn receive(&mut self) -> Vec<u8> {
        receive_from(&mut self.output)
    }

    /// Stops all of its threads.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        // The signal is delivered to one thread, and others run until that thread has run.
        let mut status = 0;
        // SAFETY: the id is the child's, as in `signal`; a stopped child is not reaped, and the
        // status is written to a live integer.
        let stopped = unsafe { libc::waitpid(self.number(), &raw mut status, libc::WUNTRACED) };
        assert!(stopped == self.number() && libc::WIFSTOPPED(status), "{stopped}, {status}");
    }

    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: the process is a child of this one that has not been waited for, so the id is
        // still its own.
        assert_eq!(unsafe { libc::kill(self.number(), signal) }, 0);
    }

    fn number(&self) -> libc::pid_t {
        libc::pid_t::try_from(self.child.id()).unwrap()
    }
}

impl Drop for PeerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn peer_of(test: &str) -> String {
    format!("{test}, the peer")
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The next message. It follows an `@`; other output has none, or precedes it.
pub fn receive_from(from: &mut impl BufRead) -> Vec<u8> {
    loop {
        let mut line = String::new();
        assert_ne!(from.read_line(&mut line).unwrap(), 0, "the other process has ended");
        if let Some((_, text)) = line.trim_end().split_once('@') {
            let digits = text.as_bytes().chunks(2).map(|two| std::str::from_utf8(two).unwrap());
            return digits.map(|two| u8::from_str_radix(two, 16).unwrap()).collect();
        }
    }
}

#[expect(clippy::print_stdout, reason = "standard output is the way to the other process")]
pub fn send(bytes: &[u8]) {
    println!("@{}", hexadecimal(bytes));
}

/// The agent of a peer.
pub fn agent_from_environment() -> terrane_nixl::Agent {
    AgentBuilder::from_env().unwrap().build().unwrap()
}

/// The peer: exports this many blocks, and serves until it is requested to end.
pub fn serve(blocks: u32) {
    let (agent, mut input) = (agent_from_environment(), std::io::stdin().lock());
    let layout = registered(&HeapAllocator::system(), &agent, config(blocks), CONTIGUOUS);
    send(&agent.export(&layout).unwrap());
    // It may be stopped or killed here; otherwise its standard input is closed.
    let mut rest = Vec::new();
    let _ = input.read_to_end(&mut rest);
}

/// Runs `body` in a child process in which UCX uses TCP: a stopped peer then does not answer, on
/// any machine.
pub fn over_tcp(test: &str, body: impl FnOnce()) {
    over_tcp_with(test, BLOCKS, body);
}

/// Like [`over_tcp`], with a peer that has this many blocks.
pub fn over_tcp_with(test: &str, blocks: u32, body: impl FnOnce()) {
    if is_child(&peer_of(test)) {
        return serve(blocks);
    }
    in_child_with(test, &[("UCX_TLS", "tcp,self")], body);
}

/// The number of blocks at each end, unless a test sets another.
const BLOCKS: u32 = 8;

/// An agent, a peer in another process, and an end at each.
pub struct Ends {
    pub agent: terrane_nixl::Agent,
    pub process: PeerProcess,
    pub remote: RemoteLayout,
    pub local: Endpoint,
    pub manager: TransferManager,
}

impl Ends {
    /// With an engine that does not wait when it drops.
    pub fn new(test: &str) -> Self {
        Self::with_drop_timeout(test, Duration::ZERO)
    }

    pub fn with_drop_timeout(test: &str, drop_timeout: Duration) -> Self {
        Self::with(test, BLOCKS, NixlEngineOptions { drop_timeout, ..NixlEngineOptions::default() })
    }

    /// With this many blocks at each end.
    pub fn with(test: &str, blocks: u32, options: NixlEngineOptions) -> Self {
        let (agent, mut process) = (agent(), PeerProcess::start(test));
        let remote = agent.import(&process.receive()).unwrap();
        let local = registered(&HeapAllocator::system(), &agent, config(blocks), CONTIGUOUS);
        let local = Endpoint::new(local).unwrap();
        let engine = terrane_nixl::NixlEngine::new(&agent, options).unwrap();
        let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
        Self { agent, process, remote, local, manager }
    }

    pub fn write(&self, block: u32) -> Transfer {
        Transfer::new(&self.local, self.remote.endpoint()).blocks(&[block], &[block])
    }
}

/// Waits until a block may be written.
#[track_caller]
pub fn free(end: &Endpoint, block: u32) {
    let begun = Instant::now();
    while let Err(error) = end.hold_for_write(&[block]) {
        assert!(begun.elapsed() < TIMEOUT, "{error}");
        thread::sleep(Duration::from_millis(1));
    }
}
