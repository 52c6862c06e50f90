//! Tells damage from torn writes, and decides whether a removal may be lost.
//!
//! A mark says that all records up to one are durable and how many of them are tombstones. An invalid
//! record up to there is damage. If fewer tombstones were found than the mark says, one of the damaged
//! records was a removal of any older key. All records before the last damaged one are then dropped.

use terrane_core::convert::to_u64;

use super::scan::{Gap, Marks};
use super::source::{Kind, Source};
use crate::disk::format::checkpoint::Header;
use crate::disk::format::record::Mark;

/// The records that are lost, and those that are dropped for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Losses {
    pub torn: u64,
    pub damaged: u64,
    /// Records with lower sequence numbers are dropped.
    pub first_kept: u64,
    /// The tombstones of this epoch, those that may be lost included.
    pub tombstones: u64,
}

/// The findings of a scan, from which the losses follow.
#[derive(Debug)]
pub(crate) struct Findings<'a> {
    pub checkpoint: Option<Header>,
    pub sources: &'a [Source],
    /// By source.
    pub marks: &'a [Marks],
    pub gaps: &'a [Gap],
    /// The sequence numbers of all tombstones that were found.
    pub removes: &'a [u64],
}

/// Sequence numbers from `start` to before `end` without valid records.
#[derive(Clone, Copy, Debug)]
struct Missing {
    start: u64,
    end: u64,
    /// The highest number that was durable in the session of these records.
    durable: u64,
}

impl Findings<'_> {
    pub(crate) fn losses(&self) -> Losses {
        let mut losses = Losses::default();
        let missing = self.missing();
        for Missing { start, end, durable } in &missing {
            // `durable + 1` is the first number that a crash could lose.
            let damaged = (*end).min(durable + 1).saturating_sub(*start);
            losses.damaged += damaged;
            losses.torn += (end - start) - damaged;
        }
        let rests = self.sources.iter().filter(|source| source.has_rest).count();
        losses.torn += to_u64(rests);

        let last = self.marks.iter().filter_map(|marks| marks.last).max_by_key(|last| last.0);
        let mark = last.map_or(Mark::default(), |(_, mark)| mark);
        let before = self.checkpoint.map_or(0, |checkpoint| checkpoint.tombstones);
        let replayed = |limit| self.removes.iter().filter(|sequence| **sequence <= limit).count();
        let count = |limit| before + to_u64(replayed(limit));
        let lost = mark.tombstones.saturating_sub(count(mark.durable));
        if lost > 0 {
            // Damaged records explain the loss before torn ones do: those were never durable, unless
            // the marks of their session are damaged, too.
            let damaged = missing.iter().filter(|gap| gap.start <= gap.durable);
            let damaged = if losses.damaged >= lost {
                damaged.map(|gap| (gap.end - 1).min(gap.durable)).max()
            } else {
                let unknown = self.before_first_journal();
                let gaps = missing.iter().chain(&unknown).filter(|gap| gap.start <= mark.durable);
                gaps.map(|gap| (gap.end - 1).min(mark.durable)).max()
            };
            // Without a gap the numbers contradict each other: all that they speak of is dropped.
            losses.first_kept = damaged.unwrap_or(mark.durable + 1);
        }
        if let Some(checkpoint) = self.checkpoint
            && self.sources.iter().all(|source| source.kind != Kind::Journal(checkpoint.number))
        {
            // Its journal was durable before the checkpoint was. The journal's removals are lost.
            losses.damaged += 1;
            losses.first_kept = losses.first_kept.max(checkpoint.first_sequence);
        }
        losses.damaged += self.missing_of_checkpoint();
        // Those after the mark add to those that it states, found or lost.
        let durable = count(mark.durable);
        losses.tombstones = mark.tombstones.max(durable) + (count(u64::MAX) - durable);
        losses
    }

    /// All rows of numbers without valid records, from the checkpoint on.
    fn missing(&self) -> Vec<Missing> {
        let durable = self.durable();
        let limit = |source: usize| durable.get(source).copied().unwrap_or(0);
        let mut missing = Vec::new();
        for gap in self.gaps {
            let Some(source) = self.sources.get(gap.source) else { continue };
            if source.kind.is_journal() {
                let start = source.sequence + gap.start;
                let (end, durable) = (start + gap.records, limit(gap.source));
                missing.push(Missing { start, end, durable });
            }
        }
        // Numbers between the journals: the end of a file, or a whole file, is missing.
        let mut expected = self.checkpoint.map(|checkpoint| checkpoint.first_sequence);
        let mut before = None;
        for (index, source) in self.sources.iter().enumerate() {
            if !source.kind.is_journal() {
                continue;
            }
            if let Some(start) = expected.filter(|start| *start < source.sequence) {
                let durable = limit(before.unwrap_or(index));
                missing.push(Missing { start, end: source.sequence, durable });
            }
            expected = Some(source.sequence + source.records);
            before = Some(index);
        }
        missing
    }

    /// The numbers before the first journal, if there is no checkpoint. They may belong to an older
    /// epoch, so that they are not counted.
    fn before_first_journal(&self) -> Option<Missing> {
        let first = self.sources.iter().find(|source| source.kind.is_journal())?;
        let is_known = self.checkpoint.is_some() || first.sequence <= 1;
        (!is_known).then_some(Missing { start: 1, end: first.sequence, durable: 0 })
    }

    /// For each file the highest number that was durable in its session. A session never writes to
    /// the journals of an earlier one, and its marks say nothing about what they had lost.
    fn durable(&self) -> Vec<u64> {
        let mut durable = vec![0; self.sources.len()];
        let mut highest = 0;
        for (marks, durable) in self.marks.iter().zip(&mut durable).rev() {
            let own = marks.last.map_or(0, |(_, mark)| mark.durable);
            highest = own.max(highest);
            *durable = highest;
            if marks.starts_session {
                highest = 0;
            }
        }
        durable
    }

    fn missing_of_checkpoint(&self) -> u64 {
        let of_checkpoint = |gap: &&Gap| {
            let source = self.sources.get(gap.source);
            source.is_some_and(|source| !source.kind.is_journal())
        };
        self.gaps.iter().filter(of_checkpoint).map(|gap| gap.records).sum()
    }
}
