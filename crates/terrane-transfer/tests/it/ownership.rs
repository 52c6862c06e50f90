//! Values that a copy needs drop after the copy has ended, whatever happens to its completion.

use std::future::{Future, IntoFuture};
use std::mem::ManuallyDrop;
use std::sync::Arc;

use terrane_testkit::engine::{Fault, SimulatedEngine};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::recorder::{Journal, NoteOnDrop, RecordingAllocator};
use terrane_transfer::{Completion, Transfer, TransferManager};

use crate::support::*;

struct Recorded {
    journal: Journal,
    heap: HeapAllocator,
    engine: Arc<SimulatedEngine>,
    completion: Completion<NoteOnDrop>,
}

/// A transfer in flight that is the only owner of its ends: memory 0 is the source, memory 1 the
/// destination.
fn in_flight(fault: Option<Fault>) -> Recorded {
    let journal = Journal::new();
    let heap = HeapAllocator::system().with_quarantine();
    let allocator = RecordingAllocator::new(heap.clone(), &journal);
    let engine = Arc::new(SimulatedEngine::default());
    engine.hold();
    fault.into_iter().for_each(|fault| engine.fail_next(fault));
    let manager = TransferManager::new([engine.clone() as _]);
    let source = endpoint_in(&allocator, config(8), CONTIGUOUS);
    let destination = endpoint_in(&allocator, config(8), OUTER_FIRST);
    let transfer = Transfer::new(&source, &destination).blocks(&[0, 1], &[3, 4]);
    let guard = journal.note_on_drop("guard dropped");
    let completion = manager.submit(transfer, guard).unwrap();
    drop((source, destination, manager));
    Recorded { journal, heap, engine, completion }
}

impl Recorded {
    /// Lets the copy end after `lose` has disposed of its completion. All that the transfer owned
    /// existed until then, and drops afterwards, the memory before the guard.
    #[track_caller]
    fn check_nothing_drops_before_the_end(
        self,
        lose: impl FnOnce(Completion<NoteOnDrop>),
    ) -> HeapAllocator {
        let Self { journal, heap, engine, completion } = self;
        lose(completion);
        assert_eq!(journal.lines(), ["allocate 0", "allocate 1"], "something dropped too early");
        journal.note("copy ends");
        engine.release_all();
        engine.wait_until_idle();
        for released in ["release 0", "release 1"] {
            journal.assert_before("copy ends", released);
            if journal.contains("guard dropped") {
                journal.assert_before(released, "guard dropped");
            }
        }
        heap.assert_all_freed();
        heap.assert_quarantine_untouched();
        heap
    }
}

const ENDS: [Option<Fault>; 4] =
    [None, Some(Fault::ShortCopy { after_runs: 2 }), Some(Fault::Engine), Some(Fault::DropJob)];

#[test]
fn a_dropped_completion_frees_nothing_early() {
    for end in ENDS {
        let recorded = in_flight(end);
        let journal = recorded.journal.clone();
        recorded.check_nothing_drops_before_the_end(drop);
        assert!(journal.contains("guard dropped"), "{end:?}: {:?}", journal.lines());
    }
}

#[test]
fn a_cancelled_future_frees_nothing_early() {
    for end in ENDS {
        let recorded = in_flight(end);
        let journal = recorded.journal.clone();
        recorded.check_nothing_drops_before_the_end(|completion| {
            let mut future = completion.into_future();
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(std::pin::Pin::new(&mut future).poll(&mut context).is_pending());
        });
        assert!(journal.contains("guard dropped"), "{end:?}: {:?}", journal.lines());
    }
}

#[test]
fn a_leaked_completion_leaks_the_outcome_and_no_memory() {
    for end in ENDS {
        let recorded = in_flight(end);
        let journal = recorded.journal.clone();
        recorded.check_nothing_drops_before_the_end(|completion| {
            let _ = ManuallyDrop::new(completion);
        });
        assert!(!journal.contains("guard dropped"), "the guard is with the outcome, leaked");
    }
}

#[test]
fn an_unused_outcome_drops_with_its_completion() {
    let Recorded { journal, heap, engine, completion } = in_flight(None);
    engine.release_all();
    engine.wait_until_idle();
    assert!(completion.has_ended());
    assert!(!journal.contains("guard dropped"), "the guard waits to be taken");
    heap.assert_all_freed();
    drop(completion);
    journal.assert_before("release 1", "guard dropped");
}

#[test]
fn the_guard_is_returned_on_success_and_on_failure() {
    for end in ENDS {
        let Recorded { journal, engine, completion, .. } = in_flight(end);
        engine.release_all();
        let outcome = completion.wait();
        assert_eq!(outcome.result.is_ok(), end.is_none());
        assert!(!journal.contains("guard dropped"));
        // The memory was freed before the outcome was available.
        assert!(journal.contains("release 0") && journal.contains("release 1"));
        drop(outcome);
        assert!(journal.contains("guard dropped"));
    }
}

#[test]
fn a_transfer_that_never_started_releases_its_values() {
    let Recorded { journal, engine, completion, .. } = in_flight(Some(Fault::Engine));
    let heap = HeapAllocator::system();
    let manager = TransferManager::new([engine.clone() as _]);
    let [source, destination] = [CONTIGUOUS, BLOCK_FIRST].map(|k| endpoint_in(&heap, config(2), k));
    let transfer = Transfer::new(&source, &destination).blocks(&[0], &[1]);
    let guard = journal.note_on_drop("dependent's guard dropped");
    drop(manager.submit(transfer.after(&completion.ticket()), guard).unwrap());
    drop((source, destination));
    assert_eq!(heap.live(), 2, "it waits and keeps its memory");
    engine.release_all();
    drop(completion);
    engine.wait_until_idle();
    heap.assert_all_freed();
    for guard in ["guard dropped", "dependent's guard dropped"] {
        journal.assert_before("release 1", guard);
    }
}

#[test]
fn an_engine_that_drops_with_jobs_releases_everything() {
    let Recorded { journal, heap, engine, completion } = in_flight(None);
    drop(completion);
    assert_eq!(heap.live(), 2);
    drop(engine);
    heap.assert_all_freed();
    journal.assert_before("release 1", "guard dropped");
}

/// Queues register it, so the kernel keeps its pages: no other memory may appear at its addresses.
#[test]
fn the_memory_for_requests_of_queues_lives_after_its_endpoint() {
    for kind in [CONTIGUOUS, OUTER_FIRST] {
        let heap = HeapAllocator::system();
        let end = endpoint_in(&heap, config(2), kind);
        let live = heap.live();
        let memory = end.io_memory().first().cloned().expect("host memory");
        drop(end);
        assert_eq!(heap.live(), live);
        drop(memory.clone());
        assert_eq!(heap.live(), live);
        drop(memory);
        heap.assert_all_freed();
    }
}

#[test]
fn a_hold_keeps_its_endpoint_and_the_memory_until_it_drops() {
    let heap = HeapAllocator::system();
    let end = endpoint_in(&heap, config(2), CONTIGUOUS);
    let hold = end.hold_for_write(&[0]).unwrap();
    drop(end);
    assert_eq!(heap.live(), 1);
    drop(hold);
    heap.assert_all_freed();
}
