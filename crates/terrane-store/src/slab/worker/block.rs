//! A block between its submission and its end.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use terrane_core::checksum::Crc64;
use terrane_storage::{IoFailure, IoFailureReason, IoFile};

use crate::slab::cut::Cursor;
use crate::slab::request::{SlabDirection, SlabDone, SlabFailure, SlabRequest, SlabSink};
use crate::slab::waiting::Turn;

/// A block in progress.
pub(super) struct Block {
    pub(super) request: SlabRequest,
    pub(super) turn: Turn,
    pub(super) file: IoFile,
    pub(super) memory_alignment: u64,
    pub(super) is_direct: bool,
    /// The offset of the slot in the file.
    pub(super) offset: u64,
    pub(super) total: u64,
    /// The end of what was submitted.
    pub(super) submitted: Cursor,
    pub(super) in_flight: usize,
    pub(super) sum: BlockSum,
    pub(super) failure: Option<SlabFailure>,
}

/// The checksum of a block, which is computed in order.
pub(super) struct BlockSum {
    pub(super) sum: Crc64,
    /// The end of what was added.
    pub(super) added: Cursor,
    /// Parts whose bytes are there, by their beginnings; with their ends.
    ready: BTreeMap<u64, u64>,
    /// Whether the block is in the list of those that have bytes to add.
    pub(super) is_listed: bool,
}

/// A result and its receiver.
pub(super) struct Ended {
    sink: Arc<dyn SlabSink>,
    index: usize,
    result: Result<SlabDone, SlabFailure>,
}

impl Ended {
    pub(super) fn new(request: SlabRequest, result: Result<SlabDone, SlabFailure>) -> Self {
        Self { sink: request.sink, index: request.index, result }
    }

    /// Calls the sinks and drops them. A panic of one must not end the I/O thread.
    pub(super) fn deliver_all(all: impl Iterator<Item = Self>) {
        let mut last: Option<Arc<dyn SlabSink>> = None;
        for Self { sink, index, result } in all {
            if let Some(other) = last.take_if(|last| !Arc::ptr_eq(last, &sink)) {
                call_sink(move || other.results_end());
            }
            call_sink(|| sink.block_ended(index, result));
            // One that drops here has other clones, or is called again below.
            last.get_or_insert(sink);
        }
        if let Some(last) = last {
            call_sink(move || last.results_end());
        }
    }
}

fn call_sink(call: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(call)).is_err() {
        tracing::error!("the receiver of a disk request panicked");
    }
}

impl Block {
    pub(super) fn new(
        request: SlabRequest,
        turn: Turn,
        (file, memory_alignment, is_direct): (IoFile, u64, bool),
        offset: u64,
        total: u64,
    ) -> Self {
        Self {
            request,
            turn,
            file,
            memory_alignment,
            is_direct,
            offset,
            total,
            submitted: Cursor::default(),
            in_flight: 0,
            sum: BlockSum::new(),
            failure: None,
        }
    }

    pub(super) fn is_write(&self) -> bool {
        self.request.direction == SlabDirection::Write
    }

    /// Whether parts are left to submit.
    pub(super) fn has_parts_left(&self) -> bool {
        self.failure.is_none() && self.submitted.position < self.total
    }

    /// Whether nothing more happens to the block.
    pub(super) fn has_ended(&self) -> bool {
        let is_complete = self.sum.added.position == self.total;
        self.in_flight == 0 && (self.failure.is_some() || is_complete)
    }

    pub(super) fn into_ended(self) -> Ended {
        let found = self.sum.sum.finish();
        let result = match (self.failure, self.request.direction) {
            (Some(failure), _) => Err(failure),
            (None, SlabDirection::Read { checksum: expected }) if expected != found => {
                Err(SlabFailure::Corrupt { expected, found })
            }
            (None, _) => Ok(SlabDone { bytes: self.total, checksum: found }),
        };
        Ended::new(self.request, result)
    }
}

impl BlockSum {
    fn new() -> Self {
        Self {
            sum: Crc64::new(),
            added: Cursor::default(),
            ready: BTreeMap::new(),
            is_listed: false,
        }
    }

    /// The bytes from `begin` to `end` are there. Returns whether the block is to be listed now.
    pub(super) fn add_ready(&mut self, begin: u64, end: u64) -> bool {
        self.ready.insert(begin, end);
        let is_new = !self.is_listed && self.has_next();
        self.is_listed |= is_new;
        is_new
    }

    /// Whether bytes can be added.
    pub(super) fn has_next(&self) -> bool {
        self.ready.contains_key(&self.added.position)
    }

    /// Takes the bytes to add next: their number.
    pub(super) fn take_next(&mut self) -> Option<u64> {
        let begin = self.added.position;
        Some(self.ready.remove(&begin)?.saturating_sub(begin))
    }
}

/// The meaning of a failed request for its block.
pub(super) fn failure_of(failure: IoFailure) -> SlabFailure {
    match failure.reason {
        IoFailureReason::DeadlineExceeded => SlabFailure::TimedOut,
        IoFailureReason::Cancelled => SlabFailure::Cancelled,
        _ => SlabFailure::Io(failure),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use terrane_core::sync::lock;

    use super::*;

    type Calls = Arc<Mutex<Vec<&'static str>>>;

    struct Sink {
        name: &'static str,
        calls: Calls,
        panics: bool,
    }

    impl SlabSink for Sink {
        fn block_ended(&self, _index: usize, _result: Result<SlabDone, SlabFailure>) {
            lock(&self.calls).push(self.name);
            assert!(!self.panics, "a sink of a test");
        }

        fn results_end(&self) {
            lock(&self.calls).push("end");
        }
    }

    #[test]
    fn a_sink_learns_once_that_its_results_end_also_if_it_panics() {
        let calls = Calls::default();
        let sink = |name, panics| -> Arc<dyn SlabSink> {
            Arc::new(Sink { name, calls: Arc::clone(&calls), panics })
        };
        let (a, b, c) = (sink("a", false), sink("b", true), sink("c", false));
        let order = [&a, &a, &b, &b, &c, &a];
        let ended = order.into_iter().map(|sink| Ended {
            sink: Arc::clone(sink),
            index: 0,
            result: Err(SlabFailure::Cancelled),
        });
        Ended::deliver_all(ended);
        let expected = ["a", "a", "end", "b", "b", "end", "c", "end", "a", "end"];
        assert_eq!(*lock(&calls), expected);
        assert_eq!([&a, &b, &c].map(Arc::strong_count), [1, 1, 1]);
    }
}
