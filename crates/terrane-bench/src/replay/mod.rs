//! Recorded and random sequences of allocations that run over any upstream.
//!
//! A [`Program`] is a trace without its addresses: allocate bytes into a slot, free a slot.
//! [`Program::replay`] runs it step by step, so a benchmark can time each step.
//!
//! ```
//! use terrane_bench::replay::Program;
//! use terrane_pool::HeapAllocator;
//! use terrane_pool::adaptors::TraceReader;
//!
//! let log = "Thread,Time,Action,Pointer,Size,Stream\n\
//!            1,10:00:00.000001,allocate,0x1000,512,0\n\
//!            1,10:00:00.000002,allocate,0x2000,256,0\n\
//!            1,10:00:00.000003,free,0x1000,512,0\n";
//! let program = Program::from_events(TraceReader::new(log.as_bytes())?)?;
//! let outcome = program.replay(&HeapAllocator).run();
//! assert_eq!(outcome.peak_requested.get(), 768);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod rules;
mod serving;

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;
use terrane_core::{Allocate, AllocateError, ByteCount, Label, Memory, RegionRequest};

use terrane_pool::adaptors::{TraceAction, TraceError, TraceEvent};

pub use rules::RandomRules;
pub use serving::ServingRules;

/// A sequence of allocations and frees that can be run over any upstream, any number of times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    steps: Vec<Step>,
    slots: usize,
}

/// The error of a trace that cannot become a [`Program`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The trace could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// An event frees an address that is not live.
    #[error("event {event} of the trace frees {pointer:#x}, which is not live; was it cut short?")]
    NotLive {
        /// The event, from 0.
        event: usize,
        /// The address.
        pointer: u64,
    },
    /// An event allocates an address that is live.
    #[error("event {event} of the trace allocates {pointer:#x}, which is live already")]
    AlreadyLive {
        /// The event, from 0.
        event: usize,
        /// The address.
        pointer: u64,
    },
}

/// One step of a [`Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Allocate into an empty slot.
    Allocate {
        /// The slot of the block.
        slot: usize,
        /// The bytes to request.
        bytes: ByteCount,
    },
    /// Free the block in a slot.
    Free {
        /// The slot of the block.
        slot: usize,
    },
}

impl Program {
    /// Converts a trace to a program. Failures are omitted, because the upstream decides whether a
    /// request fails. All threads and streams become one sequence.
    ///
    /// # Errors
    ///
    /// Any error among the events; [`ReplayError::NotLive`] and [`ReplayError::AlreadyLive`] for an
    /// impossible trace.
    pub fn from_events(
        events: impl IntoIterator<Item = Result<TraceEvent, TraceError>>,
    ) -> Result<Self, ReplayError> {
        let mut program = Recorder::default();
        // Blocks of zero bytes may share an address with other blocks.
        let mut live: FxHashMap<u64, usize> = FxHashMap::default();
        for (index, event) in events.into_iter().enumerate() {
            let TraceEvent { action, pointer, size, .. } = event?;
            if size.is_zero() {
                continue;
            }
            match action {
                TraceAction::AllocateFailure => {}
                TraceAction::Allocate => match live.entry(pointer) {
                    Entry::Vacant(vacant) => {
                        vacant.insert(program.allocate(size));
                    }
                    Entry::Occupied(_) => {
                        return Err(ReplayError::AlreadyLive { event: index, pointer });
                    }
                },
                TraceAction::Free => match live.remove(&pointer) {
                    Some(slot) => program.free(slot),
                    None => return Err(ReplayError::NotLive { event: index, pointer }),
                },
            }
        }
        Ok(program.finish())
    }

    /// Makes a random program. Equal rules make equal programs.
    #[must_use]
    pub fn random(rules: &RandomRules) -> Self {
        rules.program()
    }

    /// Makes a program like a serving engine's. Equal rules make equal programs.
    #[must_use]
    pub fn serving(rules: &ServingRules) -> Self {
        rules.program()
    }

    /// Returns the steps.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Returns the most blocks that are live at once.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Prepares to run the program over `upstream`.
    #[must_use]
    pub fn replay<'p, A: Allocate>(&'p self, upstream: &'p A) -> Replay<'p, A> {
        let mut live = Vec::new();
        live.resize_with(self.slots, || None);
        Replay { program: self, upstream, live, next: 0, outcome: ReplayOutcome::default() }
    }
}

/// Collects steps. Freed slots are reused, the latest first.
#[derive(Debug, Default)]
struct Recorder {
    program: Program,
    free: Vec<usize>,
}

impl Recorder {
    fn allocate(&mut self, bytes: ByteCount) -> usize {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.program.slots += 1;
            self.program.slots - 1
        });
        self.program.steps.push(Step::Allocate { slot, bytes });
        slot
    }

    fn free(&mut self, slot: usize) {
        self.free.push(slot);
        self.program.steps.push(Step::Free { slot });
    }

    fn finish(self) -> Program {
        self.program
    }
}

/// A [`Program`] that is running over an upstream. Live blocks are freed when it drops.
#[derive(Debug)]
pub struct Replay<'p, A: Allocate> {
    program: &'p Program,
    upstream: &'p A,
    live: Vec<Option<(ByteCount, A::Memory)>>,
    next: usize,
    outcome: ReplayOutcome,
}

/// The outcome of a replay.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct ReplayOutcome {
    /// Requests that were granted.
    pub granted: u64,
    /// Requests that were refused. The free of a refused block is skipped.
    pub refused: u64,
    /// The first refusal.
    pub first_refusal: Option<AllocateError>,
    /// The live bytes, as requested.
    pub live_requested: ByteCount,
    /// The most bytes that were live at once, as requested.
    pub peak_requested: ByteCount,
    /// The live bytes, as obtained.
    pub live_obtained: ByteCount,
    /// The most bytes that were live at once, as obtained.
    pub peak_obtained: ByteCount,
}

impl<A: Allocate> Replay<'_, A> {
    /// Runs the next step and returns it, or `None` at the end.
    pub fn step(&mut self) -> Option<Step> {
        let step = *self.program.steps.get(self.next)?;
        self.next += 1;
        match step {
            Step::Allocate { slot, bytes } => self.allocate(slot, bytes),
            Step::Free { slot } => self.free(slot),
        }
        Some(step)
    }

    /// Runs the rest of the program. Blocks that are live at its end are freed afterwards.
    #[must_use]
    pub fn run(mut self) -> ReplayOutcome {
        while self.step().is_some() {}
        self.outcome
    }

    /// Returns the outcome so far.
    #[must_use]
    pub fn outcome(&self) -> &ReplayOutcome {
        &self.outcome
    }

    fn allocate(&mut self, slot: usize, bytes: ByteCount) {
        let request = RegionRequest::new(bytes).labelled(Label::from("replay"));
        match self.upstream.allocate(&request) {
            Ok(memory) => {
                self.outcome.enter(bytes, memory.length());
                if let Some(place) = self.live.get_mut(slot) {
                    *place = Some((bytes, memory));
                }
            }
            Err(error) => {
                self.outcome.refused += 1;
                self.outcome.first_refusal.get_or_insert(error);
            }
        }
    }

    fn free(&mut self, slot: usize) {
        if let Some((requested, memory)) = self.live.get_mut(slot).and_then(Option::take) {
            self.outcome.leave(requested, memory.length());
        }
    }
}

impl ReplayOutcome {
    fn enter(&mut self, requested: ByteCount, obtained: ByteCount) {
        let add = |live: ByteCount, more| live.checked_add(more).unwrap_or(live);
        self.granted += 1;
        self.live_requested = add(self.live_requested, requested);
        self.live_obtained = add(self.live_obtained, obtained);
        self.peak_requested = self.peak_requested.max(self.live_requested);
        self.peak_obtained = self.peak_obtained.max(self.live_obtained);
    }

    fn leave(&mut self, requested: ByteCount, obtained: ByteCount) {
        let subtract = |live: ByteCount, less| live.checked_sub(less).unwrap_or(ByteCount::ZERO);
        self.live_requested = subtract(self.live_requested, requested);
        self.live_obtained = subtract(self.live_obtained, obtained);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_pool::adaptors::{Trace, TraceReader, TraceSink};
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn a_traced_run_becomes_the_same_program() {
        let program = Program::random(&RandomRules { steps: 1000, ..RandomRules::default() });
        let device = Simulated::new(SimulatedOptions::default());
        let sink = TraceSink::new(Vec::new());
        let traced = Trace::new(&device, sink.clone());
        let mut replay = program.replay(&traced);
        while replay.step().is_some() {}
        assert_eq!(replay.outcome().granted, device.usage().allocations);
        assert_eq!(replay.outcome().live_requested, device.usage().live_bytes);
        sink.flush().unwrap();
        drop(replay);
        drop(traced);
        assert_eq!(device.usage().live_blocks, 0);

        let log = sink.finish().unwrap().unwrap();
        let events = TraceReader::new(&*log).unwrap();
        let recorded = Program::from_events(events).unwrap();
        // The recording also frees the blocks that were live at the end.
        assert_eq!(recorded.steps()[..program.steps().len()], *program.steps());
    }

    #[test]
    fn impossible_traces_are_refused() {
        let header = "Thread,Time,Action,Pointer,Size,Stream\n";
        let row = |action| format!("1,00:00:00.0,{action},0x10,1,0\n");
        let parse = |rows: &str| {
            Program::from_events(TraceReader::new(format!("{header}{rows}").as_bytes()).unwrap())
        };
        let error = parse(&row("free")).unwrap_err();
        assert!(matches!(error, ReplayError::NotLive { event: 0, pointer: 16 }), "{error}");
        let twice = parse(&row("allocate").repeat(2)).unwrap_err();
        assert!(matches!(twice, ReplayError::AlreadyLive { event: 1, pointer: 16 }), "{twice}");
    }

    #[test]
    fn refusals_are_counted_and_their_frees_skipped() {
        let capacity = ByteCount::new(10);
        let device = Simulated::new(SimulatedOptions { capacity, ..SimulatedOptions::default() });
        let program = Program {
            steps: vec![
                Step::Allocate { slot: 0, bytes: ByteCount::new(11) },
                Step::Free { slot: 0 },
                Step::Allocate { slot: 0, bytes: ByteCount::new(9) },
            ],
            slots: 1,
        };
        let outcome = program.replay(&device).run();
        assert_eq!((outcome.granted, outcome.refused), (1, 1));
        assert!(outcome.first_refusal.unwrap().is_exhaustion());
    }
}
