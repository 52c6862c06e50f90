//! Transfers step by step, also with a peer that makes no progress by itself: an agent without a
//! progress thread, over TCP.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test says what it expects by panicking")]

mod files;
mod overlaps;

use std::error::Error;
use std::mem::ManuallyDrop;
use std::net::{Shutdown, TcpStream};
use std::os::fd::FromRawFd;
use std::sync::Mutex;
use std::time::Duration;

use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{InProcess, Pattern};
use terrane_testkit::process::in_child_with;
use terrane_transfer::{
    Completion, CopyEngine, Declined, Endpoint, EndpointCache, OnlyPath, Quote, Transfer,
    TransferError, TransferManager, TransferOptions, TransferPlan,
};

use super::shared::{AdvanceResult, SharedTransfer};
use super::*;
use crate::agent::builder::AgentBuilder;
use crate::agent::config::BackendConfig;
use crate::engine::context::EngineContext;
use crate::engine::thread::queue::Queue;
use crate::peers::error::ImportError;
use crate::peers::remote::RemoteLayout;

const TIMEOUT: Duration = Duration::from_secs(120);

/// Accepts every job, and does not execute it.
#[derive(Debug, Default)]
struct KeepsJobs(Mutex<Vec<CopyJob>>);

// SAFETY: the test takes the jobs, and passes them to transfers.
unsafe impl CopyEngine for KeepsJobs {
    fn name(&self) -> &'static str {
        "keeps jobs"
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

/// Blocks of 8 KiB.
fn config() -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(2).outer_dim(2).page_size(16);
    config.inner_dim(64).element(ElementFormat::Width(2)).build().unwrap()
}

fn layout(agent: &Agent) -> PhysicalLayout {
    let builder = LayoutBuilder::new(config()).kind(LayoutKind::FullyContiguous);
    builder.allocate(&HeapAllocator::system()).register(agent).build().unwrap()
}

/// An agent, another agent that owns blocks, and an endpoint of each.
struct TwoAgents {
    owner: Agent,
    blocks: Endpoint,
    export: Vec<u8>,
    agent: Agent,
    remote: RemoteLayout,
    local: Endpoint,
}

impl TwoAgents {
    fn new(owner: AgentBuilder) -> Self {
        let (owner, agent) = (owner.build().unwrap(), builder().build().unwrap());
        let blocks = Endpoint::new(layout(&owner)).unwrap();
        let export = owner.export(blocks.layout()).unwrap();
        let remote = agent.import(&export).unwrap();
        let local = Endpoint::new(layout(&agent)).unwrap();
        Self { owner, blocks, export, agent, remote, local }
    }

    /// Two agents whose owner makes progress only when its notifications are queried.
    fn silent() -> Self {
        Self::new(builder().progress_thread(None))
    }

    /// A read of a block into the local block of the same id.
    fn read(&self, block: u32) -> (NixlTransfer, Completion<&'static str>) {
        let read = Transfer::new(self.remote.endpoint(), &self.local);
        queued(&self.agent, read.blocks(&[block], &[block]))
    }

    /// The same, in flight.
    fn reading(&self, block: u32) -> (NixlTransfer, Completion<&'static str>) {
        let (mut transfer, completion) = self.read(block);
        assert!(matches!(self.advance(&mut transfer), TransferProgress::Changed));
        assert_eq!(transfer.requests[0].poll(&self.agent), RequestState::InFlight);
        (transfer, completion)
    }

    fn advance(&self, transfer: &mut NixlTransfer) -> TransferProgress {
        transfer.advance(&self.agent, &Rates::new(&self.agent))
    }

    /// Advances the transfer until it ends, and calls `meanwhile` before each step.
    fn finish(
        &self,
        transfer: &mut NixlTransfer,
        meanwhile: impl Fn(),
    ) -> Option<Box<OrphanedRequests>> {
        poll_within_timeout(|| {
            meanwhile();
            match self.advance(transfer) {
                TransferProgress::Ended => Some(None),
                TransferProgress::Orphaned(orphaned) => Some(Some(orphaned)),
                TransferProgress::Unchanged | TransferProgress::Changed => None,
            }
        })
    }

    fn is_claimed(&self, block: u32) -> bool {
        self.local.hold_for_write(&[block]).is_err()
    }
}

/// A transfer that is queued and has not started.
fn queued(agent: &Agent, transfer: Transfer) -> (NixlTransfer, Completion<&'static str>) {
    let (job, reserved, completion) = accepted(agent, transfer);
    let context = context(agent);
    (NixlTransfer::new(job, reserved, &context.options, &context.prepared), completion)
}

/// The same, before a `NixlTransfer` exists.
fn accepted(
    agent: &Agent,
    transfer: Transfer,
) -> (CopyJob, ReservedRoute, Completion<&'static str>) {
    let engine = Arc::<KeepsJobs>::default();
    // There is no engine's thread, so a waiting thread advances the transfer until it ends.
    let manager = TransferManager::new([Arc::clone(&engine) as _]).with_spin(TIMEOUT);
    let completion = manager.submit(transfer, "guard").unwrap();
    let job = engine.0.lock().unwrap().pop().unwrap();
    let route = Route::of(agent, &EndpointCache::default(), job.plan()).unwrap();
    (job, route.reserve(agent).unwrap(), completion)
}

fn context(agent: &Agent) -> Arc<EngineContext> {
    let options = Arc::new(NixlEngineOptions::default());
    let (rates, prepared) = (Rates::new(agent), Arc::new(PreparedLists::new(&options)));
    Arc::new(EngineContext { agent: agent.clone(), options, rates, prepared })
}

#[track_caller]
fn poll_within_timeout<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < TIMEOUT);
        std::thread::yield_now();
    }
}

#[track_caller]
fn lost_at(completion: Completion<&'static str>) -> NixlStep {
    let outcome = completion.wait();
    assert_eq!(outcome.guard, "guard");
    let error = outcome.result.unwrap_err();
    match error.source().and_then(|cause| cause.downcast_ref()) {
        Some(RequestError::PeerLost { step, .. }) => *step,
        other => panic!("{other:?} of {error:?}"),
    }
}

fn over_tcp(test: &str, body: impl FnOnce()) {
    in_child_with(test, &[("UCX_TLS", "tcp,self")], body);
}

#[test]
fn a_transfer_that_ended_by_its_deadline_is_not_late() {
    let agents = TwoAgents::new(builder());
    Pattern::new(1).fill(&agents.blocks).unwrap();
    let (mut transfer, completion) = agents.read(1);
    assert!(matches!(agents.advance(&mut transfer), TransferProgress::Changed));
    poll_within_timeout(|| {
        (transfer.requests[0].poll(&agents.agent) == RequestState::Completed).then_some(())
    });
    // No thread has polled until now.
    transfer.deadline = Some(Instant::now());
    assert!(matches!(agents.advance(&mut transfer), TransferProgress::Ended));
    completion.wait().result.unwrap();

    let (mut transfer, completion) = agents.read(1);
    transfer.deadline = Some(Instant::now());
    transfer.has_started = true;
    assert!(matches!(agents.advance(&mut transfer), TransferProgress::Ended));
    let error = completion.wait().result.unwrap_err();
    assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error}");
}

/// Its destination is unchanged, and can be read.
#[test]
fn a_queued_transfer_that_must_stop_does_not_start() {
    let agents = TwoAgents::new(builder());
    let (mut cancelled, completion) = agents.read(1);
    completion.cancel();
    assert!(matches!(agents.advance(&mut cancelled), TransferProgress::Ended));
    let error = completion.wait().result.unwrap_err();
    assert!(matches!(error, TransferError::Cancelled { started: false, .. }), "{error}");
    drop(agents.local.hold_for_read(&[1]).unwrap());

    let read = Transfer::new(agents.remote.endpoint(), &agents.local).blocks(&[2], &[2]);
    let (mut late, completion) = queued(&agents.agent, read.deadline(Instant::now()));
    assert!(matches!(agents.advance(&mut late), TransferProgress::Ended));
    let error = completion.wait().result.unwrap_err();
    assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error}");
    drop(agents.local.hold_for_read(&[2]).unwrap());
}

#[test]
fn a_cancelled_transfer_posts_no_further_request() {
    let agents = TwoAgents::new(builder());
    let read = Transfer::new(agents.remote.endpoint(), &agents.local).blocks(&[1], &[1]);
    let (mut transfer, completion) = queued(&agents.agent, read.layer_by_layer());
    assert!(matches!(agents.advance(&mut transfer), TransferProgress::Changed));
    let next = transfer.next;
    assert!(next.run < transfer.job.as_ref().unwrap().plan().runs().len());
    completion.cancel();
    assert!(agents.finish(&mut transfer, || ()).is_none());
    assert_eq!(transfer.next, next);
    let error = completion.wait().result.unwrap_err();
    assert!(matches!(error, TransferError::Cancelled { started: true, .. }), "{error}");
    let reading = agents.local.hold_for_read(&[1]);
    assert!(matches!(reading, Err(TransferError::Incomplete { .. })), "{reading:?}");

    // Its only request is posted already.
    let (mut transfer, completion) = agents.read(2);
    assert!(matches!(agents.advance(&mut transfer), TransferProgress::Changed));
    completion.cancel();
    assert!(agents.finish(&mut transfer, || ()).is_none());
    completion.wait().result.unwrap();
}

#[test]
fn the_state_of_requests_is_unknown_after_nixl_forgot_their_peer() {
    const TEST: &str =
        "engine::transfer::tests::the_state_of_requests_is_unknown_after_nixl_forgot_their_peer";
    over_tcp(TEST, || {
        let agents = TwoAgents::silent();
        let (mut transfer, completion) = agents.reading(1);
        let name = agents.agent.nixl_name_of(&agents.owner);
        agents.agent.raw().invalidate_remote_md(&name).unwrap();
        let mut orphaned = agents.finish(&mut transfer, || ()).unwrap();
        assert_eq!(lost_at(completion), NixlStep::Transfer);
        assert_eq!(orphaned.poll(&agents.agent), Outstanding::Unknowable);
        assert!(agents.is_claimed(1));
        drop((transfer, orphaned));
        assert!(agents.is_claimed(1), "the memory of a read that may go on was released");
        let error = agents.agent.import(&agents.export).unwrap_err();
        assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
    });
}

#[test]
fn requests_that_failed_in_flight_end_with_their_connection() {
    const TEST: &str =
        "engine::transfer::tests::requests_that_failed_in_flight_end_with_their_connection";
    over_tcp(TEST, || {
        let mut agents = TwoAgents::silent();
        let (mut transfer, completion) = agents.reading(1);
        let (mut other, also) = agents.reading(2);
        let name = agents.owner.name().clone();
        // Its sockets close.
        let blocks =
            std::mem::replace(&mut agents.blocks, Endpoint::new(layout(&agents.agent)).unwrap());
        drop((blocks, std::mem::replace(&mut agents.owner, builder().build().unwrap())));

        let mut orphaned = agents.finish(&mut transfer, || ()).unwrap();
        assert_eq!(lost_at(completion), NixlStep::Transfer);
        // Another transfer uses the connection too.
        assert_eq!(orphaned.poll(&agents.agent), Outstanding::Some);
        assert!(agents.is_claimed(1));
        let mut orphaned_of_other = agents.finish(&mut other, || ()).unwrap();
        assert_eq!(lost_at(also), NixlStep::Transfer);
        for (orphaned, block) in [(&mut orphaned, 1), (&mut orphaned_of_other, 2)] {
            poll_within_timeout(|| {
                (orphaned.poll(&agents.agent) == Outstanding::Nothing).then_some(())
            });
            assert!(!agents.is_claimed(block));
        }

        // Nothing is posted to a lost peer. After its restart it is another peer.
        let (mut transfer, completion) = agents.read(1);
        assert!(matches!(agents.advance(&mut transfer), TransferProgress::Ended));
        assert_eq!(lost_at(completion), NixlStep::Prepare);
        agents.owner = builder().named(name).build().unwrap();
        agents.blocks = Endpoint::new(layout(&agents.owner)).unwrap();
        agents.export = agents.owner.export(agents.blocks.layout()).unwrap();
        agents.remote = agents.agent.refresh(&agents.export).unwrap();
        Pattern::new(4).fill(&agents.blocks).unwrap();
        let (mut transfer, completion) = agents.read(1);
        assert!(agents.finish(&mut transfer, || ()).is_none());
        completion.wait().result.unwrap();
        assert_eq!(
            Pattern::new(4)
                .verify_with(&agents.local, &[1], &[1], 0..2, &InProcess)
                .unwrap()
                .mismatches,
            0
        );
    });
}

/// Without the peer's keys NIXL would no longer report the state of the request.
#[test]
fn no_keys_are_loaded_while_a_request_is_in_flight() {
    const TEST: &str = "engine::transfer::tests::no_keys_are_loaded_while_a_request_is_in_flight";
    over_tcp(TEST, || {
        let agents = TwoAgents::silent();
        let further = layout(&agents.owner);
        let further = agents.owner.export(&further).unwrap();
        let (mut transfer, completion) = agents.reading(1);
        for _ in 0..2 {
            let error = agents.agent.import(&further).unwrap_err();
            assert!(matches!(error, ImportError::PeerBusy { transfers: 1, .. }), "{error}");
        }
        // Requests that need no keys are safe.
        assert_eq!(agents.agent.import(&agents.export).unwrap().peer(), agents.remote.peer());
        assert_eq!(transfer.requests[0].poll(&agents.agent), RequestState::InFlight);
        let orphaned = agents.finish(&mut transfer, || drop(agents.owner.notifications().unwrap()));
        assert!(orphaned.is_none());
        completion.wait().result.unwrap();
        agents.agent.import(&further).unwrap();
    });
}

/// The memory of requests in flight stays alive and registered, even if all other owners drop.
#[test]
fn memory_of_requests_in_flight_is_kept_and_stays_registered() {
    const TEST: &str =
        "engine::transfer::tests::memory_of_requests_in_flight_is_kept_and_stays_registered";
    over_tcp(TEST, || {
        let mut agents = TwoAgents::silent();
        let (mut transfer, completion) = agents.reading(1);
        let weak = agents.local.downgrade();
        let address = agents.local.base(0).unwrap().as_host().unwrap().get().to_ne_bytes();
        let agent = agents.agent.clone();
        // According to NIXL's own metadata.
        let is_registered = || {
            let account = agent.raw().get_local_md().unwrap();
            account.windows(address.len()).any(|bytes| bytes == address)
        };
        agents.local = Endpoint::new(layout(&agents.agent)).unwrap();
        drop(completion);
        assert!(!weak.has_gone() && is_registered());
        let orphaned = agents.finish(&mut transfer, || drop(agents.owner.notifications().unwrap()));
        assert!(orphaned.is_none() && weak.has_gone() && !is_registered());
    });
}

/// Both agents live, and the connection between them breaks.
#[test]
fn the_next_import_reopens_a_broken_connection() {
    const TEST: &str = "engine::transfer::tests::the_next_import_reopens_a_broken_connection";
    over_tcp(TEST, || {
        let agents = TwoAgents::new(builder());
        Pattern::new(6).fill(&agents.blocks).unwrap();
        let read = |block| {
            let (mut transfer, completion) = agents.read(block);
            drop(agents.finish(&mut transfer, || ()));
            completion
        };
        read(1).wait().result.unwrap();
        assert!(break_connections() > 0);
        let (mut transfer, completion) = agents.read(1);
        let orphaned = agents.finish(&mut transfer, || ());
        lost_at(completion);
        assert_eq!(lost_at(read(2)), NixlStep::Prepare);
        // No other request is in flight, so the connection is closed by now, even if the read is
        // orphaned.
        let again = agents.agent.import(&agents.export).unwrap();
        assert_eq!(again.peer(), agents.remote.peer());
        assert_eq!(again.endpoint().id(), agents.remote.endpoint().id());
        if let Some(mut orphaned) = orphaned {
            poll_within_timeout(|| {
                (orphaned.poll(&agents.agent) == Outstanding::Nothing).then_some(())
            });
        }
        Pattern::new(7).fill(&agents.local).unwrap();
        read(1).wait().result.unwrap();
        let seen =
            Pattern::new(6).verify_with(&agents.local, &[1], &[1], 0..2, &InProcess).unwrap();
        assert_eq!(seen.mismatches, 0);
    });
}

/// Shuts down all TCP connections of the process at both ends. Returns their number.
fn break_connections() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open: Vec<i32> =
        open.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    open.into_iter()
        .filter(|&descriptor| {
            // SAFETY: the descriptor is only queried and shut down, and never closed. If another
            // thread has closed it, these calls fail.
            let stream = ManuallyDrop::new(unsafe { TcpStream::from_raw_fd(descriptor) });
            stream.peer_addr().is_ok() && stream.shutdown(Shutdown::Both).is_ok()
        })
        .count()
}

#[test]
fn only_the_submitter_advances_a_new_transfer_until_another_thread_polls() {
    let agents = TwoAgents::new(builder());
    let read = |block: u32| {
        let read =
            Transfer::new(agents.remote.endpoint(), &agents.local).blocks(&[block], &[block]);
        let (job, reserved, completion) = accepted(&agents.agent, read);
        let queue = Arc::default();
        (SharedTransfer::new(job, reserved, &context(&agents.agent), &queue), completion, queue)
    };
    let before = Instant::now();
    // A waiting thread advances it at once.
    let (transfer, completion, _queue): (_, _, Arc<Queue>) = read(0);
    assert!(
        matches!(transfer.advance_on_engine(before), AdvanceResult::LeftToSubmitter(until) if until > before)
    );
    completion.wait().result.unwrap();
    // The engine's thread advances it after the window if no thread waits,
    let (transfer, completion, _queue) = read(1);
    let AdvanceResult::LeftToSubmitter(until) = transfer.advance_on_engine(before) else {
        panic!("it is not left alone")
    };
    assert!(matches!(transfer.advance_on_engine(until), AdvanceResult::Changed));
    completion.wait().result.unwrap();
    // and at once if a thread only polls.
    let (transfer, completion, _queue) = read(2);
    assert!(matches!(transfer.advance_on_engine(before), AdvanceResult::LeftToSubmitter(_)));
    assert!(!completion.has_ended());
    assert!(matches!(transfer.advance_on_engine(before), AdvanceResult::Changed));
    completion.wait().result.unwrap();
}
