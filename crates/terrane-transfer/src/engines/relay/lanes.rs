//! How many chunks an engine has at a time.

use std::collections::VecDeque;

use terrane_core::ByteCount;

use super::step::{Part, RelayStep};

/// Which of a relay's two engines, by its number.
pub(super) type LaneNumber = usize;

/// What each of the two engines has, and what waits for it.
///
/// Engines share themselves out among the jobs that they have. Of many chunks at once, all would
/// end together, after as long as all of them take: the other engine idle until then, and this one
/// from then on. So an engine has few, and gets the others in the order in which they came, those
/// that go into slots and those that come out of them alike.
#[derive(Default)]
pub(super) struct Lanes {
    lanes: [Lane; 2],
}

#[derive(Default)]
struct Lane {
    waiting: VecDeque<Part>,
    /// How many of those that wait are on their first hop.
    waiting_inwards: usize,
    running: usize,
}

/// An engine has two chunks at least, so that it never waits for the next, and as many as make up
/// so much: a disk wants several requests at once.
const IN_FLIGHT: ByteCount = ByteCount::mib(16);

/// How many chunks of so many bytes an engine has at a time, of a relay of so many slots: half of
/// them at most, as the other half is for the other hop.
pub(super) fn at_a_time(chunk: ByteCount, slots: usize) -> usize {
    let wanted = IN_FLIGHT.get().checked_div(chunk.get()).unwrap_or(2).max(2);
    ByteCount::new(wanted).to_usize().min(slots / 2).max(1)
}

impl Lanes {
    /// Has a part wait for its engine.
    pub(super) fn push(&mut self, number: LaneNumber, part: Part) {
        if let Some(lane) = self.lanes.get_mut(number) {
            lane.waiting_inwards += usize::from(part.step == RelayStep::IntoBounce);
            lane.waiting.push_back(part);
        }
    }

    /// Whether a chunk that is to go into a slot waits for the engine already: one is enough for
    /// the engine to go on with, and further ones would keep slots from the other hop.
    pub(super) fn has_next(&self, number: LaneNumber) -> bool {
        self.lanes.get(number).is_none_or(|lane| lane.waiting_inwards > 0)
    }

    /// The part that is the engine's next, which has it from now on, if `most` of it allows one
    /// more.
    pub(super) fn begin(
        &mut self,
        number: LaneNumber,
        most: impl Fn(&Part) -> usize,
    ) -> Option<Part> {
        let lane = self.lanes.get_mut(number)?;
        let part = lane.waiting.pop_front_if(|part| lane.running < most(part))?;
        lane.waiting_inwards -= usize::from(part.step == RelayStep::IntoBounce);
        lane.running += 1;
        Some(part)
    }

    /// The engine has one part less.
    pub(super) fn end(&mut self, number: LaneNumber) {
        if let Some(lane) = self.lanes.get_mut(number) {
            lane.running -= 1;
        }
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
