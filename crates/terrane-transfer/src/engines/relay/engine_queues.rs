//! Limits on the number of chunks in each engine.

use std::collections::VecDeque;

use terrane_core::ByteCount;
use terrane_core::convert::to_usize;

use super::step::{PartId, RelayStep};

/// The number of one of a relay's two engines: 0 or 1.
pub(super) type EngineNumber = usize;

/// The parts that each engine is copying, those that wait for it, and the transfers whose next
/// chunk needs a slot.
///
/// An engine divides its bandwidth among its jobs. With many chunks at once, all would end
/// together: the other engine would be idle until then, and this one afterwards. So an engine has
/// few chunks at a time. It gets the others in the order of their arrival, for both hops alike.
#[derive(Default)]
pub(super) struct EngineQueues {
    queues: [EngineQueue; 2],
    /// The engine whose transfers get the next slot, if one of them needs it.
    next: EngineNumber,
}

#[derive(Default)]
struct EngineQueue {
    /// The transfers, in turn, whose next chunk needs a slot and begins in this engine.
    turns: VecDeque<u64>,
    waiting: VecDeque<PartId>,
    /// The number of waiting parts that are on their first hop.
    waiting_on_first_hop: usize,
    running: usize,
}

/// An engine has at least two chunks, so that it never idles between chunks. It has at least this
/// many bytes, because a disk needs several requests at once.
const IN_FLIGHT: ByteCount = ByteCount::mib(16);

/// The number of chunks of this size in an engine. It is at most half of the relay's slots, because
/// the other half is for the other hop.
pub(super) fn at_a_time(chunk: ByteCount, slots: usize) -> usize {
    let wanted = IN_FLIGHT.get().checked_div(chunk.get()).unwrap_or(2).max(2);
    to_usize(wanted).min(slots / 2).max(1)
}

impl EngineQueues {
    /// Queues a part for its engine.
    pub(super) fn push(&mut self, number: EngineNumber, part: PartId) {
        let engine = &mut self.queues[number];
        engine.waiting_on_first_hop += usize::from(part.step == RelayStep::IntoBounce);
        engine.waiting.push_back(part);
    }

    /// Puts a transfer behind the others of this engine.
    pub(super) fn queue_turn(&mut self, number: EngineNumber, transfer: u64) {
        self.queues[number].turns.push_back(transfer);
    }

    /// Takes the transfer that gets the next slot, and the engine of its first hop.
    ///
    /// An engine's transfers wait while a chunk on its first hop waits for that engine. One such
    /// chunk keeps the engine busy. More would take slots from the other hop.
    pub(super) fn next_turn(&mut self) -> Option<(EngineNumber, u64)> {
        [self.next, 1 - self.next].into_iter().find_map(|number| {
            let engine = &mut self.queues[number];
            let transfer = engine.turns.pop_front_if(|_| engine.waiting_on_first_hop == 0)?;
            Some((number, transfer))
        })
    }

    /// Records that a transfer got a slot: the next one is for the other engine.
    pub(super) fn got_slot(&mut self, number: EngineNumber) {
        self.next = 1 - number;
    }

    /// Returns the turn of a transfer that got no slot.
    pub(super) fn keep_turn(&mut self, number: EngineNumber, transfer: u64) {
        self.queues[number].turns.push_front(transfer);
        self.next = number;
    }

    /// Starts the engine's next part and returns it, if the engine has fewer than `most`.
    pub(super) fn begin(
        &mut self,
        number: EngineNumber,
        most: impl Fn(&PartId) -> usize,
    ) -> Option<PartId> {
        let engine = &mut self.queues[number];
        let part = engine.waiting.pop_front_if(|part| engine.running < most(part))?;
        engine.waiting_on_first_hop -= usize::from(part.step == RelayStep::IntoBounce);
        engine.running += 1;
        Some(part)
    }

    /// Records that a part of the engine has ended.
    pub(super) fn end(&mut self, number: EngineNumber) {
        self.queues[number].running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_has_few_large_chunks_and_several_small_ones() {
        let of = |mib, slots| at_a_time(ByteCount::mib(mib), slots);
        assert_eq!(
            [of(16, 8), of(64, 8), of(8, 8), of(4, 8), of(1, 8), of(1, 64)],
            [2, 2, 2, 4, 4, 16]
        );
        assert_eq!([of(16, 1), of(16, 2), of(16, 3), of(16, 4)], [1, 1, 1, 2]);
        assert_eq!(at_a_time(ByteCount::ZERO, 8), 2);
    }
}
