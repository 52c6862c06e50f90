//! What a guard has found, and what it watches.

use std::sync::Arc;

use terrane_core::{ByteCount, Label, Location, Memory, Span};

use super::canary::{Canaries, Frame, Reach};
use super::violation::{GuardViolation, StaleReference};
use crate::adaptors::live_ranges::LiveRanges;
use crate::sync::Mutex;

/// What a [`Guard`](super::Guard) has found. Cloning gives another handle to the same log.
#[derive(Clone, Debug)]
pub struct GuardLog(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    live: LiveRanges<Watched>,
    next_generation: u64,
    violations: Vec<GuardViolation>,
    found: u64,
    reach: Reach,
}

#[derive(Clone, Debug)]
struct Watched {
    /// What was handed out of the span that was granted: all, or what lies between the canaries.
    block: Span,
    generation: u64,
    label: Label,
    canaries: Option<Canaries>,
}

/// So many violations are kept; more are only counted.
const KEPT_VIOLATIONS: usize = 1024;

impl GuardLog {
    /// An empty one. Canaries of what is watched are read by means of `reach`.
    pub(super) fn new(reach: Reach) -> Self {
        Self(Arc::new(Mutex::new(State {
            live: LiveRanges::new(),
            next_generation: 1,
            violations: Vec::new(),
            found: 0,
            reach,
        })))
    }

    /// The violations found so far, the first 1,024 of them.
    #[must_use]
    pub fn violations(&self) -> Vec<GuardViolation> {
        self.0.lock().violations.clone()
    }

    /// How many violations were found.
    #[must_use]
    pub fn found(&self) -> u64 {
        self.0.lock().found
    }

    /// How many blocks are live.
    #[must_use]
    pub fn live(&self) -> usize {
        self.0.lock().live.len()
    }

    /// Enters a violation.
    pub(super) fn report(&self, violation: GuardViolation) {
        self.0.lock().report(violation);
    }

    /// Checks the canaries of every live block, and says how many violations there were.
    pub(super) fn verify(&self) -> usize {
        let mut state = self.0.lock();
        let found: Vec<_> = state
            .live
            .iter()
            .flat_map(|(_, watched)| {
                // SAFETY: an entry leaves the table, under the lock that is held here, before its
                // memory drops.
                unsafe { watched.violations(&state.reach) }
            })
            .collect();
        let count = found.len();
        found.into_iter().for_each(|violation| state.report(violation));
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
        let state = self.0.lock();
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
        let mut state = self.0.lock();
        if let Some((_, watched)) = state.live.overlapping(&granted) {
            let violation = GuardViolation::Overlap {
                new: granted,
                label: label.clone(),
                existing: watched.block,
                existing_label: watched.label.clone(),
            };
            state.report(violation.clone());
            return Err(Box::new(violation));
        }
        let generation = state.next_generation;
        state.next_generation += 1;
        let canaries = frame.and_then(|frame| {
            // SAFETY: the memory has not been handed out, overlaps nothing that is live, and what
            // will be handed out of it is the block between the canaries.
            let written = unsafe { Canaries::write(memory, frame, generation, &state.reach) };
            written.unwrap_or_else(|error| {
                tracing::warn!(%error, %label, "a block has no canaries");
                state.report(GuardViolation::Unwatched { block, label: label.clone() });
                None
            })
        });
        state.live.insert(granted, Watched { block, generation, label: label.clone(), canaries });
        Ok(Entry { log: self.clone(), granted, block, generation })
    }
}

impl State {
    fn report(&mut self, violation: GuardViolation) {
        tracing::error!(%violation, "guarded memory was violated");
        self.found += 1;
        if self.violations.len() < KEPT_VIOLATIONS {
            self.violations.push(violation);
        }
    }
}

impl Watched {
    /// # Safety
    ///
    /// The memory is alive.
    unsafe fn violations(&self, reach: &Reach) -> Vec<GuardViolation> {
        let Some(canaries) = self.canaries else { return Vec::new() };
        let (block, label) = (self.block, &self.label);
        // SAFETY: by the caller's promise.
        match unsafe { canaries.overwritten(reach) } {
            Ok(overwritten) => overwritten
                .map(|(side, distance)| {
                    let label = label.clone();
                    GuardViolation::Overwritten { block, label, side, distance }
                })
                .collect(),
            Err(error) => {
                tracing::warn!(%error, %label, "a block's canaries cannot be read");
                vec![GuardViolation::Unwatched { block, label: label.clone() }]
            }
        }
    }
}

/// The entry of a live block; on drop, its canaries are checked and it leaves the table.
pub(super) struct Entry {
    log: GuardLog,
    granted: Span,
    pub(super) block: Span,
    pub(super) generation: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut state = self.log.0.lock();
        if let Some(watched) = state.live.remove(&self.granted) {
            // SAFETY: the memory drops after its entry.
            let found = unsafe { watched.violations(&state.reach) };
            found.into_iter().for_each(|violation| state.report(violation));
        }
    }
}
