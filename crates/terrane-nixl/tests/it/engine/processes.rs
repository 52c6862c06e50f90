//! Peers in processes of their own: that answer, that hang, and that die.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use terrane_layout::LayoutKind;
use terrane_nixl::{
    AgentBuilder, Forgotten, ImportError, NixlEngineOptions, NixlError, NixlStep, RemoteLayout,
    RequestFailed,
};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::process::{in_child_with, is_child};
use terrane_transfer::{Completion, Endpoint, Outcome, Transfer, TransferError, TransferManager};

use super::support::*;

/// How long what should happen at once may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// The same process of this test again, in which the test is the peer.
struct PeerProcess {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl PeerProcess {
    fn start(test: &str) -> Self {
        Self::start_as(test, AgentBuilder::unnamed().name().as_str())
    }

    /// With an agent of this name.
    fn start_as(test: &str, name: &str) -> Self {
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

    fn say(&mut self, bytes: &[u8]) {
        let line = format!("@{}\n", hexadecimal(bytes));
        self.child.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    }

    fn hear(&mut self) -> Vec<u8> {
        heard(&mut self.output)
    }

    /// Stops all of its threads.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        // The signal goes to one of them, and others run until that one has had its turn.
        let mut status = 0;
        // SAFETY: the number is the child's, see `signal`; a child that has stopped is not reaped, and
        // the status is written to a live integer.
        let stopped = unsafe { libc::waitpid(self.number(), &raw mut status, libc::WUNTRACED) };
        assert!(stopped == self.number() && libc::WIFSTOPPED(status), "{stopped}, {status}");
    }

    fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: the process is a child of this one that nobody has waited for, so the number is its.
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

fn peer_of(test: &str) -> String {
    format!("{test}, the peer")
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The next line that is a message: whatever else is written stands before an `@` or has none.
fn heard(from: &mut impl BufRead) -> Vec<u8> {
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
fn say(bytes: &[u8]) {
    println!("@{}", hexadecimal(bytes));
}

/// The agent of a peer.
fn of_the_environment() -> terrane_nixl::Agent {
    AgentBuilder::from_env().unwrap().build().unwrap()
}

/// The peer: exports 8 blocks, in which every byte is 9, and serves until it is told to end.
fn serve() {
    let (agent, mut input) = (of_the_environment(), std::io::stdin().lock());
    let layout = registered(&HeapAllocator::system(), &agent, config(8), CONTIGUOUS);
    say(&agent.export(&layout).unwrap());
    let _ = input.read(&mut []);
    // Here it may be stopped or killed; else its standard input is closed.
    let mut rest = Vec::new();
    let _ = input.read_to_end(&mut rest);
}

/// Runs `body` in a process of its own, in which UCX goes by TCP: a peer that does not run answers
/// nothing then, on any machine.
fn over_tcp(test: &str, body: impl FnOnce()) {
    if is_child(&peer_of(test)) {
        return serve();
    }
    in_child_with(test, &[("UCX_TLS", "tcp,self")], body);
}

/// An agent, a peer in another process, and an end at each.
struct Ends {
    agent: terrane_nixl::Agent,
    process: PeerProcess,
    remote: RemoteLayout,
    local: Endpoint,
    manager: TransferManager,
}

impl Ends {
    /// With an engine that does not wait when it drops.
    fn new(test: &str) -> Self {
        Self::with_farewell(test, Duration::ZERO)
    }

    fn with_farewell(test: &str, farewell: Duration) -> Self {
        let (agent, mut process) = (agent(), PeerProcess::start(test));
        let remote = agent.import(&process.hear()).unwrap();
        let local = registered(&HeapAllocator::system(), &agent, config(8), CONTIGUOUS);
        let local = Endpoint::new(local).unwrap();
        let options = NixlEngineOptions { farewell, ..NixlEngineOptions::default() };
        let engine = terrane_nixl::NixlEngine::new(&agent, options).unwrap();
        let manager = TransferManager::new([std::sync::Arc::new(engine) as _]);
        Self { agent, process, remote, local, manager }
    }

    fn write(&self, block: u32) -> Transfer {
        Transfer::new(&self.local, self.remote.endpoint()).blocks(&[block], &[block])
    }
}

/// Makes a transfer with block 1 of `end`, of a peer that does not answer, until one is given up with
/// a request in flight. On a busy machine, a deadline may pass before there is one. `wait_for` waits
/// for the outcome.
fn give_up(
    manager: &TransferManager,
    end: &Endpoint,
    transfer: impl Fn() -> Transfer,
    wait_for: impl Fn(Completion<&'static str>) -> Outcome<&'static str>,
) {
    let mut wait = Duration::from_millis(100);
    while end.hold_for_write(&[1]).is_ok() {
        assert!(wait < PATIENCE, "nothing was ever in flight");
        let transfer = transfer().deadline(Instant::now() + wait);
        let outcome = wait_for(manager.submit(transfer, "guard").unwrap());
        assert_eq!(outcome.guard, "guard");
        match outcome.result {
            Err(TransferError::DeadlineExceeded { .. }) => {}
            other => panic!("{other:?}"),
        }
        wait *= 2;
    }
}

#[test]
fn a_peer_that_hangs_costs_the_transfer_and_not_the_memory() {
    const TEST: &str = "engine::processes::a_peer_that_hangs_costs_the_transfer_and_not_the_memory";
    over_tcp(TEST, || {
        let ends = Ends::new(TEST);
        end_of(ends.manager.submit(ends.write(0), ()).unwrap()).result.unwrap();

        ends.process.stop();
        give_up(&ends.manager, &ends.local, || ends.write(1), end_of);
        // Nothing may write what UCX may still read, and the peer's blocks may still be written.
        assert!(ends.local.hold_for_write(&[1]).unwrap_err().is_conflict());
        assert!(ends.remote.endpoint().hold_for_read(&[1]).unwrap_err().is_conflict());
        drop(ends.local.hold_for_write(&[0]).unwrap());
        assert_eq!(ends.agent.forget(ends.remote.peer()).unwrap(), Forgotten::AfterTransfers(1));

        ends.process.resume();
        free(&ends.local, 1);
    });
}

#[test]
fn an_engine_that_drops_leaves_alone_what_may_still_be_written() {
    const TEST: &str =
        "engine::processes::an_engine_that_drops_leaves_alone_what_may_still_be_written";
    over_tcp(TEST, || {
        let Ends { agent, process, remote, local, manager } = Ends::new(TEST);
        process.stop();
        let read = || Transfer::new(remote.endpoint(), &local).blocks(&[1], &[1]);
        // Here it is the thread that waits which gives up.
        let manager = manager.with_attention(PATIENCE);
        give_up(&manager, &local, read, Completion::wait);
        drop(manager);
        assert!(local.hold_for_write(&[1]).unwrap_err().is_conflict());
        // Nor does anybody take down the connection under it.
        assert_eq!(agent.forget(remote.peer()).unwrap(), Forgotten::AfterTransfers(1));
        assert_eq!(agent.disconnect(), 0);
        let weak = local.downgrade();
        drop((agent, remote, local));
        assert!(!weak.has_gone(), "the memory of a read that may go on has been let go of");
    });
}

#[test]
fn an_engine_may_wait_for_ever_when_it_drops() {
    const TEST: &str = "engine::processes::an_engine_may_wait_for_ever_when_it_drops";
    over_tcp(TEST, || {
        let ends = Ends::with_farewell(TEST, Duration::MAX);
        let Ends { agent: _agent, process, remote, local, manager } = ends;
        process.stop();
        let read = || Transfer::new(remote.endpoint(), &local).blocks(&[1], &[1]);
        give_up(&manager, &local, read, end_of);
        let weak = local.downgrade();
        thread::scope(|scope| {
            scope.spawn(move || drop((manager, local, remote)));
            process.resume();
        });
        assert!(weak.has_gone(), "the engine has not waited");
    });
}

/// At which step the peer was lost.
#[track_caller]
fn lost_at(error: &TransferError) -> NixlStep {
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestFailed::PeerLost { step, .. }) => *step,
        other => panic!("{other:?} of {error:?}"),
    }
}

#[test]
fn a_peer_that_dies_in_the_middle_is_an_error() {
    const TEST: &str = "engine::processes::a_peer_that_dies_in_the_middle_is_an_error";
    over_tcp(TEST, || {
        let mut ends = Ends::new(TEST);
        end_of(ends.manager.submit(ends.write(0), ()).unwrap()).result.unwrap();
        ends.process.stop();
        let deadline = Instant::now() + PATIENCE;
        let completion = ends.manager.submit(ends.write(1).deadline(deadline), ()).unwrap();
        ends.process.child.kill().unwrap();
        // The engine may have come to it only after the connection broke.
        let step = lost_at(&end_of(completion).result.unwrap_err());
        assert!(matches!(step, NixlStep::Post | NixlStep::Transfer), "{step}");
        // Its memory is free again once the connection is closed, and further transfers fail as well.
        free(&ends.local, 1);
        let completion = ends.manager.submit(ends.write(2).deadline(deadline), ()).unwrap();
        assert_eq!(lost_at(&end_of(completion).result.unwrap_err()), NixlStep::Prepare);
        let error = ends.agent.notify(ends.remote.peer(), b"?").unwrap_err();
        assert!(matches!(error, NixlError::PeerLost { .. }), "{error}");
    });
}

/// Started again under its name, it is reached again, whether or not the loss was noticed before.
#[test]
fn a_peer_that_was_killed_comes_back_under_its_name() {
    const TEST: &str = "engine::processes::a_peer_that_was_killed_comes_back_under_its_name";
    over_tcp(TEST, || {
        let mut ends = Ends::new(TEST);
        let image = Image::scribble(&ends.local, &InProcess, 3);
        for is_noticed in [true, false] {
            end_of(ends.manager.submit(ends.write(0), ()).unwrap()).result.unwrap();
            ends.process.child.kill().unwrap();
            ends.process.child.wait().unwrap();
            if is_noticed {
                let error = end_of(ends.manager.submit(ends.write(1), ()).unwrap()).result;
                lost_at(&error.unwrap_err());
                free(&ends.local, 1);
            }
            ends.process = PeerProcess::start_as(TEST, ends.remote.agent().as_str());
            let export = ends.process.hear();
            let error = ends.agent.import(&export).unwrap_err();
            assert!(matches!(error, ImportError::PeerChanged { .. }), "{error}");
            let again = ends.agent.refresh(&export).unwrap();
            assert_ne!(again.peer(), ends.remote.peer());
            ends.remote = again;
        }
        end_of(ends.manager.submit(ends.write(2), ()).unwrap()).result.unwrap();
        let mut expected = Image::of(&ends.local, &InProcess);
        let read = Transfer::new(ends.remote.endpoint(), &ends.local).blocks(&[2], &[5]);
        end_of(ends.manager.submit(read, ()).unwrap()).result.unwrap();
        expected.transfer(&image, &[2], &[5], 0..2);
        Image::of(&ends.local, &InProcess).assert_equals(&expected, "written, and read back");
    });
}

/// Waits until a block may be written.
#[track_caller]
fn free(end: &Endpoint, block: u32) {
    let begun = Instant::now();
    while let Err(error) = end.hold_for_write(&[block]) {
        assert!(begun.elapsed() < PATIENCE, "{error}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A peer that reads what was written to it, and answers.
fn answer() {
    let (agent, mut input) = (of_the_environment(), std::io::stdin().lock());
    let layout = registered(&HeapAllocator::system(), &agent, config(8), LayoutKind::ALL[2]);
    say(&agent.export(&layout).unwrap());
    let asker = agent.import(&heard(&mut input)).unwrap();
    let endpoint = Endpoint::new(layout).unwrap();
    let told = agent.wait_for_notifications(Instant::now() + PATIENCE).unwrap();
    assert_eq!(told[0].message, b"all written");
    // The asker's bytes, made anew of their seed.
    let theirs = registered(&HeapAllocator::system(), &agent, config(8), CONTIGUOUS);
    let image = Image::scribble(&Endpoint::new(theirs).unwrap(), &InProcess, 5);
    let (all, found) = ((0..8).collect::<Vec<_>>(), Image::of(&endpoint, &InProcess));
    let mut expected = found.clone();
    expected.transfer(&image, &all, &all, 0..2);
    found.assert_equals(&expected, "what the other process has written");
    say(b"right");
    agent.notify(asker.peer(), b"all read").unwrap();
    let _ = input.read_to_end(&mut Vec::new());
}

#[test]
fn blocks_travel_between_processes_and_so_do_messages() {
    const TEST: &str = "engine::processes::blocks_travel_between_processes_and_so_do_messages";
    if is_child(&peer_of(TEST)) {
        return answer();
    }
    let mut ends = Ends::new(TEST);
    let own = registered(&HeapAllocator::system(), &ends.agent, config(1), CONTIGUOUS);
    ends.process.say(&ends.agent.export(&own).unwrap());
    let image = Image::scribble(&ends.local, &InProcess, 5);
    let all: Vec<_> = (0..8).collect();
    let write = Transfer::new(&ends.local, ends.remote.endpoint()).blocks(&all, &all);
    end_of(ends.manager.submit(write.notify(*b"all written"), ()).unwrap()).result.unwrap();
    assert_eq!(ends.process.hear(), b"right");
    let told = ends.agent.wait_for_notifications(Instant::now() + PATIENCE).unwrap();
    assert_eq!(told[0].message, b"all read");

    // And back, the other way round.
    let mut expected = Image::scribble(&ends.local, &InProcess, 6);
    let back: Vec<_> = all.iter().rev().copied().collect();
    let read = Transfer::new(ends.remote.endpoint(), &ends.local).blocks(&all, &back);
    end_of(ends.manager.submit(read, ()).unwrap()).result.unwrap();
    expected.transfer(&image, &all, &back, 0..2);
    Image::of(&ends.local, &InProcess).assert_equals(&expected, "read back");
}
