//! What a guard has found, and what it watches.

use std::sync::{Arc, OnceLock};

use terrane_core::{BoxedCause, ByteCount, Label, Location, Memory, Span};

use super::canary::{Canaries, Frame, Reach, Side};
use super::violation::{GuardViolation, StaleReference};
use crate::adaptors::live_ranges::LiveRanges;
use crate::sync::{Mutex, yield_now};

/// What a [`Guard`](super::Guard) has found. Cloning gives another handle to the same log.
#[derive(Clone, Debug)]
pub struct GuardLog(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// Neither this nor a subscriber of traces is called under the lock of the state.
    reach: Reach,
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
    /// What was handed out of the span that was granted: all, or what lies between the canaries.
    block: Span,
    generation: u64,
    label: Label,
    /// Set once they are written. A thread reads them while it holds a reference to this; the block's
    /// entry waits for such references before the memory drops.
    canaries: OnceLock<Canaries>,
}

/// So many violations are kept; more are only counted.
const KEPT_VIOLATIONS: usize = 1024;

impl GuardLog {
    /// An empty one. Canaries of what is watched are read by means of `reach`.
    pub(super) fn new(reach: Reach) -> Self {
        let state =
            State { live: LiveRanges::new(), next_generation: 1, violations: Vec::new(), found: 0 };
        Self(Arc::new(Inner { state: Mutex::new(state), reach }))
    }

    /// The violations found so far, the first 1,024 of them.
    #[must_use]
    pub fn violations(&self) -> Vec<GuardViolation> {
        self.0.state.lock().violations.clone()
    }

    /// How many violations were found.
    #[must_use]
    pub fn found(&self) -> u64 {
        self.0.state.lock().found
    }

    /// How many blocks are live.
    #[must_use]
    pub fn live(&self) -> usize {
        self.0.state.lock().live.len()
    }

    /// Enters a violation, and traces it.
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

    /// Reports each canary that was overwritten, or that they cannot be read. Returns the number of
    /// violations.
    fn report_reading(&self, reading: Reading) -> usize {
        let Reading { block, label, overwritten } = reading;
        let found = match overwritten {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%error, %label, "a block's canaries cannot be read");
                self.report(GuardViolation::Unwatched { block, label });
                return 1;
            }
        };
        let count = found.len();
        for (side, distance) in found {
            let label = label.clone();
            self.report(GuardViolation::Overwritten { block, label, side, distance });
        }
        count
    }

    /// Checks the canaries of every live block, and says how many violations there were.
    pub(super) fn verify(&self) -> usize {
        let live: Vec<_> =
            self.0.state.lock().live.iter().map(|(_, watched)| Arc::clone(watched)).collect();
        // The references end before anything is reported: a subscriber of traces may drop a block.
        let read = |watched: Arc<Watched>| {
            // SAFETY: the entry waits for this reference before its memory drops.
            unsafe { watched.read(&self.0.reach) }
        };
        let readings: Vec<_> = live.into_iter().filter_map(read).collect();
        let mut count = 0;
        for reading in readings {
            count += self.report_reading(reading);
        }
        count
    }

    /// Checks that `length` bytes at `location` lie within the live block of this generation.
    ///
    /// # Errors
    ///
    /// [`StaleReference`] if the block is gone, has been replaced, or is shorter.
    pub(super) fn check(
        &self,
        location: Location,
        length: ByteCount,
        generation: u64,
    ) -> Result<(), StaleReference> {
        let state = self.0.state.lock();
        let (_, watched) =
            state.live.containing(location).ok_or(StaleReference::NotLive { location })?;
        if watched.generation != generation {
            return Err(StaleReference::Generation {
                location,
                presented: generation,
                live: watched.generation,
                label: watched.label.clone(),
            });
        }
        let block = watched.block;
        let ends = (location.checked_add(length), block.location.checked_add(block.length));
        match ends {
            (Some(end), Some(block_end))
                if block.location.place() <= location.place()
                    && end.place() <= block_end.place() =>
            {
                Ok(())
            }
            _ => Err(StaleReference::OutOfBounds { location, length, block_length: block.length }),
        }
    }

    /// Enters what was granted, canaries included, unless a part of it is live.
    pub(super) fn enter(
        &self,
        memory: &impl Memory,
        block: Span,
        frame: Option<&Frame>,
        label: &Label,
    ) -> Result<Entry, Box<GuardViolation>> {
        let granted = Span::of(memory);
        // In a statement of its own: the lock is held no longer.
        let watched = self.0.state.lock().watch(granted, block, label);
        let watched = watched.inspect_err(|violation| self.report((**violation).clone()))?;
        let entry = Entry { log: self.clone(), granted, watched };
        if let Some(frame) = frame {
            let seed = entry.watched.generation;
            // SAFETY: the memory has not been handed out, overlaps nothing that is live, and what
            // will be handed out of it is the block between the canaries.
            match unsafe { Canaries::write(memory, frame, seed, &self.0.reach) } {
                Ok(Some(written)) => {
                    // Only this call sets them, so there are none yet.
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
    /// Enters a block of what was granted, without canaries, unless a part of that is live.
    fn watch(
        &mut self,
        granted: Span,
        block: Span,
        label: &Label,
    ) -> Result<Arc<Watched>, Box<GuardViolation>> {
        if let Some((_, watched)) = self.live.overlapping(&granted) {
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
    unsafe fn read(&self, reach: &Reach) -> Option<Reading> {
        let canaries = self.canaries.get()?;
        // SAFETY: by the caller's promise.
        let overwritten = unsafe { canaries.overwritten(reach) };
        let overwritten = overwritten.map(Iterator::collect);
        Some(Reading { block: self.block, label: self.label.clone(), overwritten })
    }
}

/// The changed canaries of a block: on which side, and how far from the block.
struct Reading {
    block: Span,
    label: Label,
    overwritten: Result<Vec<(Side, usize)>, BoxedCause>,
}

/// The entry of a live block; on drop, its canaries are checked and it leaves the table.
pub(super) struct Entry {
    log: GuardLog,
    granted: Span,
    watched: Arc<Watched>,
}

impl Entry {
    pub(super) fn block(&self) -> Span {
        self.watched.block
    }

    pub(super) fn generation(&self) -> u64 {
        self.watched.generation
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // In a statement of its own: the lock is held no longer.
        let left = self.log.0.state.lock().live.remove(&self.granted);
        drop(left);
        while Arc::get_mut(&mut self.watched).is_none() {
            yield_now();
        }
        // SAFETY: the memory drops after its entry.
        let reading = unsafe { self.watched.read(&self.log.0.reach) };
        if let Some(reading) = reading {
            self.log.report_reading(reading);
        }
    }
}
