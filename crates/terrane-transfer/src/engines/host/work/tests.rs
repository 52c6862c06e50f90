//! Jobs that waiting threads copy, and cancelled jobs.

use std::sync::mpsc;
use std::time::Duration;

use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_testkit::memory::HeapAllocator;

use super::*;
use crate::engine::finalizer::OutcomeSink;
use crate::engine::job::TransferClaims;
use crate::engine::quote::SharedDecision;
use crate::engine::rate::Rate;
use crate::error::TransferError;
use crate::explain::{Explanation, Report};
use crate::hazard::conflict::Access;
use crate::hazard::table::incomplete::Area;
use crate::hazard::table::{ALL_TOKENS, BlockUse, HazardTable};
use crate::hazard::ticket::Ticket;
use crate::plan::planner::Planner;
use crate::transfer::{Transfer, TransferOptions};

/// A thread that already waits, and copies everything before the engine continues.
struct CopiesAtOnce(mpsc::Sender<Result<Report, TransferError>>);

impl OutcomeSink for CopiesAtOnce {
    fn invite_waiters(&self, progress: &Arc<dyn WaiterProgress>) {
        while progress.poll_blocking() {}
    }

    fn publish(&self, result: Result<Report, TransferError>) {
        let _ = self.0.send(result);
    }
}

fn explanation() -> Explanation {
    Explanation {
        source: terrane_core::StorageKind::System,
        destination: terrane_core::StorageKind::System,
        bytes: ByteCount::ZERO,
        pieces: 0,
        runs: 0,
        source_alignment: terrane_core::Alignment::BYTE,
        destination_alignment: terrane_core::Alignment::BYTE,
        engine: "host",
        predicted: Duration::ZERO,
        declined: Vec::new(),
        decision: SharedDecision::Constant(&HostPath::ThroughCache),
    }
}

/// The job of a transfer of one block of two layers, 128 bytes, and its ticket.
#[expect(clippy::unwrap_used, reason = "tests say what they expect by unwrapping it")]
fn job(sink: Arc<dyn OutcomeSink>) -> (CopyJob, Ticket) {
    let endpoint = || {
        let config = LayoutConfig::builder().num_blocks(1).num_layers(2).outer_dim(1);
        let config = config.page_size(4).inner_dim(8).element(ElementFormat::Width(2));
        let layout = LayoutBuilder::new(config.build().unwrap()).fully_contiguous();
        let memory = HeapAllocator::system();
        let layout = layout.allocate(&memory).unregistered();
        Endpoint::new(layout.build().unwrap()).unwrap()
    };
    let transfer = Transfer::new(&endpoint(), &endpoint()).blocks(&[0], &[0]);
    let plan = Planner::new().plan(&transfer).unwrap();
    let (table, ticket) = (HazardTable::new(1), Ticket::new([]));
    let claim = |access| {
        let (layers, heads, tokens) = (0..2, 0..1, ALL_TOKENS);
        let used =
            BlockUse { access, blocks: &[0], group: 0, area: Area { layers, heads, tokens } };
        let mut locked = table.lock();
        let _is_free = locked.count(&used);
        locked.claim(&ticket, &used)
    };
    let (reading, writing) = (claim(Access::Read), claim(Access::Write));
    let claims = TransferClaims { reading, writing, ticket: ticket.clone() };
    let (claims, options) = (Arc::new(claims), TransferOptions::default());
    let mut job =
        CopyJob::new(plan, claims, options, Arc::default(), ticket.clone(), explanation(), None);
    job.connect(sink, None);
    (job, ticket)
}

/// The work, in chunks of 16 bytes.
fn work(job: CopyJob) -> ChunkedJob {
    let guess = || Rate::new(1e9, Duration::ZERO, Duration::ZERO);
    let rates = HostRates { through_cache: guess(), streaming: guess(), relayout: guess() };
    ChunkedJob::new(job, HostPath::ThroughCache, ByteCount::new(16), &Arc::new(rates))
}

#[test]
fn a_job_completes_if_its_waiter_copies_everything_as_it_is_queued() {
    let (ended, ends) = mpsc::channel();
    let (job, _) = job(Arc::new(CopiesAtOnce(ended)));
    let queued = QueuedJob::new(work(job));
    ends.try_recv().expect("it has ended").expect("all bytes are copied");
    assert!(!queued.copy_one_chunk());
}

/// No thread copies before the test does.
struct Ends(mpsc::Sender<Result<Report, TransferError>>);

impl OutcomeSink for Ends {
    fn invite_waiters(&self, _: &Arc<dyn WaiterProgress>) {}

    fn publish(&self, result: Result<Report, TransferError>) {
        let _ = self.0.send(result);
    }
}

#[test]
fn a_cancelled_job_ends_before_its_next_chunk() {
    let cancelled_after = |chunks: u64| {
        let (ended, ends) = mpsc::channel();
        let (job, ticket) = job(Arc::new(Ends(ended)));
        let queued = QueuedJob::new(work(job));
        (0..chunks).for_each(|_| assert!(queued.copy_one_chunk()));
        ticket.cancel();
        assert!(!queued.copy_one_chunk());
        ends.try_recv().expect("it has ended")
    };
    for chunks in [0, 1, 7] {
        let error = cancelled_after(chunks).unwrap_err();
        let TransferError::Cancelled { started, done, total } = error else { panic!("{error:?}") };
        let expected = (chunks > 0, ByteCount::new(16 * chunks), ByteCount::new(128));
        assert_eq!((started, done, total), expected);
    }
    // Nothing remains to be stopped.
    cancelled_after(8).expect("all bytes are copied");
}
