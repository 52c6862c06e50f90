//! Flights step by step, also with a peer that does nothing until it is told to: an agent without a
//! progress thread, which is reached by TCP.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects by panicking")]

use std::error::Error;
use std::mem::ManuallyDrop;
use std::net::{Shutdown, TcpStream};
use std::os::fd::FromRawFd;
use std::sync::Mutex;
use std::time::Duration;

use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{InProcess, Pattern};
use terrane_testkit::process::in_child_with;
use terrane_transfer::{
    Completion, CopyEngine, Declined, Endpoint, OnlyPath, Quote, Transfer, TransferError,
    TransferManager, TransferOptions, TransferPlan,
};

use super::*;
use crate::engine::attended::{Attended, Means, Visit};
use crate::engine::route::Known;
use crate::engine::worker::Queue;
use crate::{AgentBuilder, BackendConfig, ImportError, NixlEngineOptions, RemoteLayout};

const PATIENCE: Duration = Duration::from_secs(120);

/// Takes whatever it is asked for, and does nothing.
#[derive(Debug, Default)]
struct Takes(Mutex<Vec<CopyJob>>);

// SAFETY: the jobs are the test's, which hands them to flights.
unsafe impl CopyEngine for Takes {
    fn name(&self) -> &'static str {
        "takes"
    }

    fn quote(&self, _: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        Ok(Quote::constant(Duration::ZERO, &OnlyPath { path: "none", reason: "a test's" }))
    }

    fn submit(&self, job: CopyJob) {
        self.0.lock().unwrap().push(job);
    }
}

fn builder() -> AgentBuilder {
    AgentBuilder::unnamed().backend(BackendConfig::new("UCX"))
}

fn layout(agent: &Agent) -> PhysicalLayout {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(2).outer_dim(2).page_size(16);
    let config = config.inner_dim(64).element(ElementFormat::Width(2)).build().unwrap();
    let builder = LayoutBuilder::new(config).kind(LayoutKind::FullyContiguous);
    builder.allocate(&HeapAllocator::system()).register(agent).build().unwrap()
}

/// An agent, another that owns blocks, and an end at each.
struct Ends {
    owner: Agent,
    blocks: Endpoint,
    export: Vec<u8>,
    agent: Agent,
    remote: RemoteLayout,
    local: Endpoint,
}

impl Ends {
    fn new(owner: AgentBuilder) -> Self {
        let (owner, agent) = (owner.build().unwrap(), builder().build().unwrap());
        let blocks = Endpoint::new(layout(&owner)).unwrap();
        let export = owner.export(blocks.layout()).unwrap();
        let remote = agent.import(&export).unwrap();
        let local = Endpoint::new(layout(&agent)).unwrap();
        Self { owner, blocks, export, agent, remote, local }
    }

    /// One whose owner makes no progress unless it is asked for notifications.
    fn silent() -> Self {
        Self::new(builder().progress_thread(None))
    }

    /// A read of a block into the same.
    fn read(&self, block: u32) -> (Flight, Completion<&'static str>) {
        let read = Transfer::new(self.remote.endpoint(), &self.local);
        taken(&self.agent, read.blocks(&[block], &[block]))
    }

    /// The same, in flight.
    fn reading(&self, block: u32) -> (Flight, Completion<&'static str>) {
        let (mut flight, completion) = self.read(block);
        assert!(matches!(self.advance(&mut flight), Step::News));
        assert_eq!(flight.requests[0].look(&self.agent), State::InFlight);
        (flight, completion)
    }

    fn advance(&self, flight: &mut Flight) -> Step {
        flight.advance(&self.agent, &Rates::new(&self.agent))
    }

    /// Goes on until the flight is over; `meanwhile` is done again and again.
    fn finish(&self, flight: &mut Flight, meanwhile: impl Fn()) -> Option<Box<Abandoned>> {
        within_patience(|| {
            meanwhile();
            match self.advance(flight) {
                Step::Over => Some(None),
                Step::GivenUp(rest) => Some(Some(rest)),
                Step::Quiet | Step::News => None,
            }
        })
    }

    fn is_claimed(&self, block: u32) -> bool {
        self.local.hold_for_write(&[block]).is_err()
    }
}

/// A transfer that has been accepted, and has not begun.
fn taken(agent: &Agent, transfer: Transfer) -> (Flight, Completion<&'static str>) {
    let (job, begun, completion) = accepted(agent, transfer);
    let means = means(agent);
    (Flight::new(job, begun, &means.options, &means.prepared), completion)
}

/// The same, of which there is no flight yet.
fn accepted(agent: &Agent, transfer: Transfer) -> (CopyJob, Begun, Completion<&'static str>) {
    let takes = Arc::<Takes>::default();
    // There is no engine's thread to sleep for: who waits helps for as long as it takes.
    let manager = TransferManager::new([Arc::clone(&takes) as _]).with_spin(PATIENCE);
    let completion = manager.submit(transfer, "guard").unwrap();
    let job = takes.0.lock().unwrap().pop().unwrap();
    let route = Route::of(agent, &Known::default(), job.plan()).unwrap();
    (job, route.begin(agent).unwrap(), completion)
}

fn means(agent: &Agent) -> Arc<Means> {
    let options = Arc::new(NixlEngineOptions::default());
    let (rates, prepared) = (Rates::new(agent), Arc::new(Prepared::new(&options)));
    Arc::new(Means { agent: agent.clone(), options, rates, prepared })
}

#[track_caller]
fn within_patience<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

#[track_caller]
fn lost_at(completion: Completion<&'static str>) -> NixlStep {
    let outcome = completion.wait();
    assert_eq!(outcome.guard, "guard");
    let error = outcome.result.unwrap_err();
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestFailed::PeerLost { step, .. }) => *step,
        other => panic!("{other:?} of {error:?}"),
    }
}

fn over_tcp(test: &str, body: impl FnOnce()) {
    in_child_with(test, &[("UCX_TLS", "tcp,self")], body);
}

#[test]
fn what_has_ended_by_its_deadline_is_not_late() {
    let ends = Ends::new(builder());
    Pattern::new(1).fill(&ends.blocks).unwrap();
    let (mut flight, completion) = ends.read(1);
    assert!(matches!(ends.advance(&mut flight), Step::News));
    within_patience(|| (flight.requests[0].look(&ends.agent) == State::Done).then_some(()));
    // No thread has polled until now.
    flight.deadline = Some(Instant::now());
    assert!(matches!(ends.advance(&mut flight), Step::Over));
    completion.wait().result.unwrap();

    let (mut flight, completion) = ends.read(1);
    flight.deadline = Some(Instant::now());
    flight.has_begun = true;
    assert!(matches!(ends.advance(&mut flight), Step::Over));
    let error = completion.wait().result.unwrap_err();
    assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error}");
}

#[test]
fn nothing_is_known_of_requests_whose_peer_nixl_has_forgotten() {
    const TEST: &str =
        "engine::flight::tests::nothing_is_known_of_requests_whose_peer_nixl_has_forgotten";
    over_tcp(TEST, || {
        let ends = Ends::silent();
        let (mut flight, completion) = ends.reading(1);
        // As a message to NIXL's listener does it.
        let name = ends.agent.nixl_name_of(&ends.owner);
        ends.agent.raw().invalidate_remote_md(&name).unwrap();
        let mut rest = ends.finish(&mut flight, || ()).unwrap();
        assert_eq!(lost_at(completion), NixlStep::Transfer);
        assert_eq!(rest.look(&ends.agent), Left::Lost);
        assert!(ends.is_claimed(1));
        drop((flight, rest));
        assert!(ends.is_claimed(1), "the memory of a read that may go on has been let go of");
        let error = ends.agent.import(&ends.export).unwrap_err();
        assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
    });
}

#[test]
fn what_failed_in_flight_ends_with_its_connection() {
    const TEST: &str = "engine::flight::tests::what_failed_in_flight_ends_with_its_connection";
    over_tcp(TEST, || {
        let mut ends = Ends::silent();
        let (mut flight, completion) = ends.reading(1);
        let (mut other, also) = ends.reading(2);
        let name = ends.owner.name().clone();
        // Its sockets close.
        let blocks =
            std::mem::replace(&mut ends.blocks, Endpoint::new(layout(&ends.agent)).unwrap());
        drop((blocks, std::mem::replace(&mut ends.owner, builder().build().unwrap())));

        let mut rest = ends.finish(&mut flight, || ()).unwrap();
        assert_eq!(lost_at(completion), NixlStep::Transfer);
        // The connection is another transfer's as well.
        assert_eq!(rest.look(&ends.agent), Left::Some);
        assert!(ends.is_claimed(1));
        let mut rest_of_other = ends.finish(&mut other, || ()).unwrap();
        assert_eq!(lost_at(also), NixlStep::Transfer);
        for (rest, block) in [(&mut rest, 1), (&mut rest_of_other, 2)] {
            within_patience(|| (rest.look(&ends.agent) == Left::Nothing).then_some(()));
            assert!(!ends.is_claimed(block));
        }

        // Nothing more is posted to a peer that is gone, and when it is back it is another.
        let (mut flight, completion) = ends.read(1);
        assert!(matches!(ends.advance(&mut flight), Step::Over));
        assert_eq!(lost_at(completion), NixlStep::Prepare);
        ends.owner = builder().named(name).build().unwrap();
        ends.blocks = Endpoint::new(layout(&ends.owner)).unwrap();
        ends.export = ends.owner.export(ends.blocks.layout()).unwrap();
        ends.remote = ends.agent.refresh(&ends.export).unwrap();
        Pattern::new(4).fill(&ends.blocks).unwrap();
        let (mut flight, completion) = ends.read(1);
        assert!(ends.finish(&mut flight, || ()).is_none());
        completion.wait().result.unwrap();
        assert_eq!(
            Pattern::new(4)
                .verify_with(&ends.local, &[1], &[1], 0..2, &InProcess)
                .unwrap()
                .mismatches,
            0
        );
    });
}

/// Without the peer's keys NIXL would no longer report the state of the request.
#[test]
fn no_keys_are_loaded_while_something_is_in_flight() {
    const TEST: &str = "engine::flight::tests::no_keys_are_loaded_while_something_is_in_flight";
    over_tcp(TEST, || {
        let ends = Ends::silent();
        let further = layout(&ends.owner);
        let further = ends.owner.export(&further).unwrap();
        let (mut flight, completion) = ends.reading(1);
        for _ in 0..2 {
            let error = ends.agent.import(&further).unwrap_err();
            assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
        }
        // Requests that need no keys are safe.
        assert_eq!(ends.agent.import(&ends.export).unwrap().peer(), ends.remote.peer());
        assert_eq!(flight.requests[0].look(&ends.agent), State::InFlight);
        let rest = ends.finish(&mut flight, || drop(ends.owner.notifications().unwrap()));
        assert!(rest.is_none());
        completion.wait().result.unwrap();
        ends.agent.import(&further).unwrap();
    });
}

/// The memory of requests in flight stays alive and registered, even if all other owners drop.
#[test]
fn what_is_in_flight_is_kept_and_stays_registered() {
    const TEST: &str = "engine::flight::tests::what_is_in_flight_is_kept_and_stays_registered";
    over_tcp(TEST, || {
        let mut ends = Ends::silent();
        let (mut flight, completion) = ends.reading(1);
        let weak = ends.local.downgrade();
        let address = ends.local.base(0).unwrap().as_host().unwrap().get().to_ne_bytes();
        let agent = ends.agent.clone();
        // In NIXL's own account of what is registered.
        let is_registered = || {
            let account = agent.raw().get_local_md().unwrap();
            account.windows(address.len()).any(|bytes| bytes == address)
        };
        ends.local = Endpoint::new(layout(&ends.agent)).unwrap();
        drop(completion);
        assert!(!weak.has_gone() && is_registered());
        let rest = ends.finish(&mut flight, || drop(ends.owner.notifications().unwrap()));
        assert!(rest.is_none() && weak.has_gone() && !is_registered());
    });
}

/// UCX and POSIX post one descriptor after another, and say of a failure no more than that.
#[test]
fn of_a_post_that_failed_nobody_knows_what_was_posted() {
    // 64 I/Os.
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let agent = AgentBuilder::unnamed().backend(posix).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let config = LayoutConfig::builder().num_blocks(64).num_layers(1).outer_dim(1).page_size(16);
    let config = config.inner_dim(64).element(ElementFormat::Width(2)).build().unwrap();
    let builder = LayoutBuilder::new(config).kind(LayoutKind::FullyContiguous);
    let file = builder.allocate(&files).register(&agent).build().unwrap();
    let builder = LayoutBuilder::new(config).kind(LayoutKind::FullyContiguous);
    let local = builder.allocate(&HeapAllocator::system()).register(&agent).build().unwrap();
    let (file, local) = (Endpoint::new(file).unwrap(), Endpoint::new(local).unwrap());

    // The test takes nearly all of them without the engine's knowledge.
    let list = |memory| nixl_sys::XferDescList::new(memory).unwrap();
    let (mut here, mut there) = (list(nixl_sys::MemType::Dram), list(nixl_sys::MemType::File));
    let address = ByteCount::new(local.base(0).unwrap().as_host().unwrap().get()).to_usize();
    let position = file.base(0).unwrap().as_file().unwrap();
    let offset = ByteCount::new(position.offset.get()).to_usize();
    for _ in 0..60 {
        here.add_desc(address, 512, 0);
        there.add_desc(offset, 512, u64::try_from(position.file.descriptor).unwrap());
    }
    let (operation, name) = (nixl_sys::XferOp::Write, agent.name().as_str());
    let raw = agent.raw();
    let other = raw.create_xfer_req(operation, &here, &there, name, None).unwrap();
    assert!(raw.post_xfer_req(&other, None).unwrap());

    let (all, back): (Vec<u32>, Vec<u32>) = (0..64).map(|id| (id, 63 - id)).unzip();
    let write = Transfer::new(&local, &file).blocks(&all, &back);
    let (mut flight, completion) = taken(&agent, write);
    let step = flight.advance(&agent, &Rates::new(&agent));
    let Step::GivenUp(mut rest) = step else { panic!("not given up") };
    let error = completion.wait().result.unwrap_err();
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestFailed::Status { step: NixlStep::Post, peer: None, .. }) => {}
        cause => panic!("{cause:?} of {error:?}"),
    }
    // A file has no connection that could be closed.
    assert_eq!(rest.look(&agent), Left::Lost);
    drop((flight, rest));
    assert!(local.hold_for_write(&[5]).is_err(), "the memory has been let go of");
    // NIXL is asked for the other one, which ends.
    within_patience(|| {
        matches!(raw.get_xfer_status(&other), Ok(nixl_sys::XferStatus::Success)).then_some(())
    });
}

#[test]
fn a_file_that_ends_before_what_was_written_is_not_taken_for_written() {
    let posix = BackendConfig::new("POSIX").parameter("ios_pool_size", "64");
    let agent = AgentBuilder::unnamed().backend(posix).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let config = LayoutConfig::builder().num_blocks(4).num_layers(1).outer_dim(1).page_size(16);
    let config = config.inner_dim(64).element(ElementFormat::Width(2)).build().unwrap();
    let builder = || LayoutBuilder::new(config).kind(LayoutKind::FullyContiguous);
    let file = builder().allocate(&files).register(&agent).build().unwrap();
    let local = builder().allocate(&HeapAllocator::system()).register(&agent).build().unwrap();
    let (file, local) = (Endpoint::new(file).unwrap(), Endpoint::new(local).unwrap());
    let write = Transfer::new(&local, &file).blocks(&[1, 2], &[1, 2]);
    let (mut flight, completion) = taken(&agent, write);
    let rates = Rates::new(&agent);
    // It has been written by the time that the backend is asked.
    assert!(matches!(flight.advance(&agent, &rates), Step::News));
    let descriptor = file.base(0).unwrap().as_file().unwrap().file.descriptor;
    let path = format!("/proc/self/fd/{descriptor}");
    let opened = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    within_patience(|| {
        opened.set_len(5000).unwrap();
        matches!(flight.advance(&agent, &rates), Step::Over).then_some(())
    });
    let error = completion.wait().result.unwrap_err();
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestFailed::WrittenShort { length: 5000, wanted: 6144 }) => {}
        cause => panic!("{cause:?} of {error:?}"),
    }
}

/// Both agents live, and what is between them breaks.
#[test]
fn a_connection_that_broke_is_made_anew_by_the_next_import() {
    const TEST: &str =
        "engine::flight::tests::a_connection_that_broke_is_made_anew_by_the_next_import";
    over_tcp(TEST, || {
        let ends = Ends::new(builder());
        Pattern::new(6).fill(&ends.blocks).unwrap();
        let read = |block| {
            let (mut flight, completion) = ends.read(block);
            drop(ends.finish(&mut flight, || ()));
            completion
        };
        read(1).wait().result.unwrap();
        assert!(break_connections() > 0);
        let (mut flight, completion) = ends.read(1);
        let rest = ends.finish(&mut flight, || ());
        lost_at(completion);
        assert_eq!(lost_at(read(2)), NixlStep::Prepare);
        // As nothing else is in flight, the connection is closed by now, whatever is left of the read.
        let again = ends.agent.import(&ends.export).unwrap();
        assert_eq!(again.peer(), ends.remote.peer());
        assert_eq!(again.endpoint().id(), ends.remote.endpoint().id());
        if let Some(mut rest) = rest {
            within_patience(|| (rest.look(&ends.agent) == Left::Nothing).then_some(()));
        }
        Pattern::new(7).fill(&ends.local).unwrap();
        read(1).wait().result.unwrap();
        let seen = Pattern::new(6).verify_with(&ends.local, &[1], &[1], 0..2, &InProcess).unwrap();
        assert_eq!(seen.mismatches, 0);
    });
}

/// Ends all TCP connections of the process at both sides, and says how many there were.
fn break_connections() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open: Vec<i32> =
        open.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    open.into_iter()
        .filter(|&descriptor| {
            // SAFETY: the descriptor is asked whether it is a connection, and not closed; should it be
            // closed by now, the questions fail.
            let stream = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(descriptor) });
            stream.peer_addr().is_ok() && stream.shutdown(Shutdown::Both).is_ok()
        })
        .count()
}

#[test]
fn a_new_transfer_is_left_to_who_submitted_it_until_somebody_looks() {
    let ends = Ends::new(builder());
    let read = |block: u32| {
        let read = Transfer::new(ends.remote.endpoint(), &ends.local).blocks(&[block], &[block]);
        let (job, begun, completion) = accepted(&ends.agent, read);
        let queue = Arc::default();
        (Attended::new(job, begun, &means(&ends.agent), &queue), completion, queue)
    };
    let before = Instant::now();
    // A waiting thread advances it at once.
    let (flight, completion, _queue): (_, _, Arc<Queue>) = read(0);
    assert!(matches!(flight.visit(before), Visit::Left(until) if until > before));
    completion.wait().result.unwrap();
    // The engine's thread takes what nobody waits for after a while,
    let (flight, completion, _queue) = read(1);
    let Visit::Left(until) = flight.visit(before) else { panic!("it is not left alone") };
    assert!(matches!(flight.visit(until), Visit::News));
    completion.wait().result.unwrap();
    // and at once if somebody only looks.
    let (flight, completion, _queue) = read(2);
    assert!(matches!(flight.visit(before), Visit::Left(_)));
    assert!(!completion.has_ended());
    assert!(matches!(flight.visit(before), Visit::News));
    completion.wait().result.unwrap();
}
