//! The log of a guard: its violations and its live blocks.

use std::sync::{Arc, OnceLock};

use terrane_core::{BoxedCause, Label, Memory, Span};

use super::canary::{Canaries, CanaryAccess, Frame, OverwrittenSide};
use super::live_ranges::LiveRanges;
use super::violation::GuardViolation;
use crate::sync::{Mutex, yield_now};

/// The violations that a [`Guard`](super::Guard) has found. Cloning returns another handle to the
/// same log.
#[derive(Clone, Debug)]
pub struct GuardLog(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Foreign code. The guard calls it without the lock of the state, and calls subscribers of
    /// traces likewise.
    access: CanaryAccess,
}

#[derive(Debug)]
struct State {
    live: LiveRanges<Arc<Watched>>,
    next_generation: u64,
    violations: Vec<GuardViolation>,
    found: u64,
}

/// A live block.
#[derive(Debug)]
struct Watched {
    /// The block within the granted span: all of it, or the part between the canaries.
    block: Span,
    /// Unique among the blocks of the guard: it seeds the canaries.
    generation: u64,
    label: Label,
    /// Set once the canaries are written. A thread that reads them holds a reference to this value.
    /// On drop, the block's entry waits for such references before the memory drops.
    canaries: OnceLock<Canaries>,
}

/// The most violations that are kept. Further violations are only counted.
const KEPT_VIOLATIONS: usize = 1024;

impl GuardLog {
    /// Creates an empty log. Canaries are read through `access`.
    pub(super) fn new(access: CanaryAccess) -> Self {
        let state =
            State { live: LiveRanges::new(), next_generation: 1, violations: Vec::new(), found: 0 };
        Self(Arc::new(Inner { state: Mutex::new(state), access }))
    }

    /// Returns the violations found so far, at most the first 1,024.
    #[must_use]
    pub fn violations(&self) -> Vec<GuardViolation> {
        self.0.state.lock().violations.clone()
    }

    /// Returns the number of violations found.
    #[must_use]
    pub fn found(&self) -> u64 {
        self.0.state.lock().found
    }

    /// Returns the number of live blocks.
    #[must_use]
    pub fn live(&self) -> usize {
        self.0.state.lock().live.len()
    }

    /// Records a violation, and traces it as an error.
    pub(super) fn report(&self, violation: GuardViolation) {
        let text = violation.to_string();
        {
            let mut state = self.0.state.lock();
            state.found += 1;
            if state.violations.len() < KEPT_VIOLATIONS {
                state.violations.push(violation);
            }
        }
        tracing::error!(violation = text, "guarded memory was violated");
    }

    /// Reports each overwritten canary, or that the canaries cannot be read. Returns the number of
    /// violations.
    fn report_reading(&self, reading: Reading) -> usize {
        let Reading { block, label, overwritten } = reading;
        let overwrites = match overwritten {
            Ok(overwrites) => overwrites,
            Err(error) => {
                tracing::warn!(%error, %label, "a block's canaries cannot be read");
                self.report(GuardViolation::Unwatched { block, label });
                return 1;
            }
        };
        let count = overwrites.len();
        for (side, distance) in overwrites {
            let label = label.clone();
            self.report(GuardViolation::Overwritten { block, label, side, distance });
        }
        count
    }

    /// Checks the canaries of every live block, and returns the number of violations.
    pub(super) fn verify(&self) -> usize {
        let live: Vec<_> = self.0.state.lock().live.values().cloned().collect();
        // The references end before any report, because a subscriber of traces may drop a block.
        let read = |watched: Arc<Watched>| {
            // SAFETY: the entry waits for this reference before its memory drops.
            unsafe { watched.read(&self.0.access) }
        };
        let readings: Vec<_> = live.into_iter().filter_map(read).collect();
        readings.into_iter().map(|reading| self.report_reading(reading)).sum()
    }

    /// Records a granted span, canaries included, unless a part of it is live.
    pub(super) fn enter(
        &self,
        memory: &impl Memory,
        block: Span,
        frame: Option<&Frame>,
        label: &Label,
    ) -> Result<LiveBlockEntry, Box<GuardViolation>> {
        let granted = Span::of(memory);
        // A separate statement, so that the lock is released here.
        let watched = self.0.state.lock().watch(granted, block, label);
        let watched = watched.inspect_err(|violation| self.report((**violation).clone()))?;
        let entry = LiveBlockEntry { log: self.clone(), granted, watched };
        if let Some(frame) = frame {
            let seed = entry.watched.generation;
            // SAFETY: the memory has not been returned to a caller, and overlaps no live block. The
            // caller will get only the block between the canaries.
            match unsafe { Canaries::write(memory, frame, seed, &self.0.access) } {
                Ok(Some(written)) => {
                    // Only this call sets the canaries, so they are not set yet.
                    let _: Result<(), _> = entry.watched.canaries.set(written);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, %label, "a block has no canaries");
                    self.report(GuardViolation::Unwatched { block, label: label.clone() });
                }
            }
        }
        Ok(entry)
    }
}

impl State {
    /// Records a block of the granted span, without canaries, unless a part of the span is live.
    fn watch(
        &mut self,
        granted: Span,
        block: Span,
        label: &Label,
    ) -> Result<Arc<Watched>, Box<GuardViolation>> {
        if let Some(watched) = self.live.overlapping(&granted) {
            return Err(Box::new(GuardViolation::Overlap {
                new: granted,
                label: label.clone(),
                existing: watched.block,
                existing_label: watched.label.clone(),
            }));
        }
        let generation = self.next_generation;
        self.next_generation += 1;
        let canaries = OnceLock::new();
        let watched = Arc::new(Watched { block, generation, label: label.clone(), canaries });
        self.live.insert(granted, Arc::clone(&watched));
        Ok(watched)
    }
}

impl Watched {
    /// Reads the canaries, if the block has any.
    ///
    /// # Safety
    ///
    /// The memory is alive.
    unsafe fn read(&self, access: &CanaryAccess) -> Option<Reading> {
        let canaries = self.canaries.get()?;
        // SAFETY: the caller promises that the memory is alive.
        let overwritten = unsafe { canaries.overwritten(access) };
        let overwritten = overwritten.map(Iterator::collect);
        Some(Reading { block: self.block, label: self.label.clone(), overwritten })
    }
}

/// The changed canaries of a block: the side, and the distance from the block.
struct Reading {
    block: Span,
    label: Label,
    overwritten: Result<Vec<(OverwrittenSide, usize)>, BoxedCause>,
}

/// The entry of a live block. On drop, it checks the canaries and is removed from the table.
pub(super) struct LiveBlockEntry {
    log: GuardLog,
    granted: Span,
    watched: Arc<Watched>,
}

impl LiveBlockEntry {
    pub(super) fn block(&self) -> Span {
        self.watched.block
    }
}

impl Drop for LiveBlockEntry {
    fn drop(&mut self) {
        // A separate statement, so that the lock is released here.
        let left = self.log.0.state.lock().live.remove(&self.granted);
        drop(left);
        while Arc::get_mut(&mut self.watched).is_none() {
            yield_now();
        }
        // SAFETY: the memory drops after its entry.
        let reading = unsafe { self.watched.read(&self.log.0.access) };
        if let Some(reading) = reading {
            self.log.report_reading(reading);
        }
    }
}
