//! Random programs.

use terrane_core::ByteCount;
use terrane_testkit::random::Seeded;

use super::{Program, Recorder};

/// The rules of a random [`Program`]. The defaults are those of RMM's `random_allocations`
/// benchmark (`cpp/benchmarks/random_allocations/random_allocations.cpp`).
///
/// Each step allocates with the given probability if both limits permit it. The size is uniform
/// between one byte and the largest. Otherwise the step frees a random live block. Without a live
/// block, the step allocates.
#[derive(Clone, Copy, Debug)]
pub struct RandomRules {
    /// The number of steps. RMM makes two for each of its "allocations".
    pub steps: usize,
    /// The probability that a step allocates, in percent.
    pub allocation_percent: u32,
    /// The maximum number of allocations of the whole program, unless nothing is live. RMM allows
    /// half as many as there are steps.
    pub allocations: usize,
    /// The largest block.
    pub largest: ByteCount,
    /// The maximum number of live bytes.
    pub cap: ByteCount,
    /// Equal seeds make equal programs.
    pub seed: u64,
}

impl Default for RandomRules {
    fn default() -> Self {
        Self {
            steps: 2000,
            allocations: 1000,
            allocation_percent: 73,
            largest: ByteCount::mib(4),
            // RMM's "16 GB" is 16,000 MiB.
            cap: ByteCount::mib(16_000),
            seed: 0,
        }
    }
}

impl RandomRules {
    pub(super) fn program(&self) -> Program {
        let mut random = Seeded::new(self.seed);
        let mut program = Recorder::default();
        let mut live: Vec<(usize, u64)> = Vec::new();
        let (mut live_bytes, mut allocations) = (0_u64, 0);
        for _ in 0..self.steps {
            let bytes = 1 + random.below_u64(self.largest.get());
            let fits = live_bytes.checked_add(bytes).is_some_and(|sum| sum <= self.cap.get());
            let is_allowed = allocations < self.allocations;
            let wants = random.below_u64(100) < u64::from(self.allocation_percent);
            if (wants && fits && is_allowed) || live.is_empty() {
                allocations += 1;
                live.push((program.allocate(ByteCount::new(bytes)), bytes));
                live_bytes = live_bytes.wrapping_add(bytes);
            } else {
                let count = ByteCount::from_usize(live.len()).get();
                let index = ByteCount::new(random.below_u64(count)).to_usize();
                let (slot, bytes) = live.swap_remove(index);
                live_bytes = live_bytes.wrapping_sub(bytes);
                program.free(slot);
            }
        }
        program.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Step;
    use super::*;

    #[test]
    fn the_rules_are_kept() {
        let cap = ByteCount::mib(40);
        let rules = RandomRules { cap, ..RandomRules::default() };
        let program = Program::random(&rules);
        assert_eq!(program.steps().len(), 2000);
        let allocations = program.steps().iter();
        let allocations = allocations.filter(|step| matches!(step, Step::Allocate { .. })).count();
        assert!(allocations <= rules.allocations, "{allocations}");
        assert_eq!(program, Program::random(&rules));
        assert_ne!(program, Program::random(&RandomRules { seed: 1, ..rules }));

        let (mut slots, mut live, mut peak) = (vec![None; program.slots()], 0, 0);
        for step in program.steps() {
            match *step {
                Step::Allocate { slot, bytes } => {
                    assert!((1..=ByteCount::mib(4).get()).contains(&bytes.get()));
                    assert!(slots[slot].replace(bytes.get()).is_none());
                    live += bytes.get();
                }
                Step::Free { slot } => live -= slots[slot].take().unwrap(),
            }
            peak = peak.max(live);
        }
        assert!(peak <= cap.get() && peak > cap.get() / 2, "{peak}");
    }
}
