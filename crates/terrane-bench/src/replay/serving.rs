//! Programs like those of a serving engine.

use terrane_core::ByteCount;
use terrane_testkit::random::Seeded;

use super::{Program, Recorder};

/// A serving engine with continuous batching, as its allocator sees it.
///
/// At each step, sequences join until the batch is full. The KV blocks of a prompt are allocated at
/// once, and its tokens are prefilled in this step. Every running sequence then generates one
/// token, and a KV block is allocated when it begins a page. Around that, the step allocates
/// activations and logits whose size follows its number of tokens, and frees them at its end. A
/// finished sequence frees its blocks. Prompt and output lengths are skewed: most are short, a few
/// are long.
///
/// This is a model, not a recording. It has the property of serving that is hard on an allocator:
/// many equal blocks with a long life, between short-lived scratch memory of varying size.
#[derive(Clone, Copy, Debug)]
pub struct ServingRules {
    /// The number of steps of the engine.
    pub engine_steps: usize,
    /// The number of sequences that run at once.
    pub batch: usize,
    /// The longest prompt, in tokens.
    pub longest_prompt: u64,
    /// The longest output, in tokens.
    pub longest_output: u64,
    /// Tokens in a KV block.
    pub page_size: u64,
    /// The bytes of a KV block.
    pub block_bytes: ByteCount,
    /// Bytes of activations for each token of a step.
    pub activation_bytes: ByteCount,
    /// Bytes of logits for each sequence of a step.
    pub logit_bytes: ByteCount,
    /// Equal seeds make equal programs.
    pub seed: u64,
}

/// An 8-billion-parameter model of 16-bit numbers: 32 layers of 8 KV heads of 128, a hidden size
/// of 4,096 and a vocabulary of 128,256.
impl Default for ServingRules {
    fn default() -> Self {
        Self {
            engine_steps: 2000,
            batch: 64,
            longest_prompt: 8192,
            longest_output: 1024,
            page_size: 16,
            block_bytes: ByteCount::mib(2),
            activation_bytes: ByteCount::kib(8),
            logit_bytes: ByteCount::new(2 * 128_256),
            seed: 0,
        }
    }
}

struct Sequence {
    tokens: u64,
    last: u64,
    blocks: Vec<usize>,
}

impl ServingRules {
    pub(super) fn program(&self) -> Program {
        let mut random = Seeded::new(self.seed);
        let mut program = Recorder::default();
        let mut running: Vec<Sequence> = Vec::new();
        for _ in 0..self.engine_steps {
            let mut prefilled = 0;
            // One prompt per step, because engines limit the tokens that they prefill.
            if running.len() < self.batch {
                let tokens = skewed(&mut random, self.longest_prompt);
                let last = tokens + skewed(&mut random, self.longest_output);
                prefilled = tokens;
                running.push(Sequence { tokens, last, blocks: Vec::new() });
            }
            for sequence in &mut running {
                sequence.tokens += 1;
                let pages = sequence.tokens.div_ceil(self.page_size.max(1));
                while ByteCount::from_usize(sequence.blocks.len()).get() < pages {
                    sequence.blocks.push(program.allocate(self.block_bytes));
                }
            }
            let sequences = ByteCount::from_usize(running.len()).get();
            let scratch = [
                (self.activation_bytes, prefilled + sequences),
                (self.activation_bytes, prefilled + sequences),
                (self.logit_bytes, sequences),
            ];
            // A step whose size in bytes overflows allocates no such scratch.
            let scratch: Vec<usize> = scratch
                .into_iter()
                .filter_map(|(bytes, count)| bytes.checked_mul("tokens", count).ok())
                .map(|bytes| program.allocate(bytes))
                .collect();
            scratch.into_iter().rev().for_each(|slot| program.free(slot));
            for done in running.extract_if(.., |sequence| sequence.tokens >= sequence.last) {
                done.blocks.into_iter().for_each(|slot| program.free(slot));
            }
        }
        program.finish()
    }
}

/// Returns a number between 1 and `longest`, usually far below: the product of two uniform numbers.
/// Half of the results are below a sixth of `longest`.
fn skewed(random: &mut Seeded, longest: u64) -> u64 {
    let first = random.below_u64(longest.max(1)) + 1;
    random.below_u64(first) + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn an_engine_comes_to_its_steady_state() {
        let rules = ServingRules { engine_steps: 600, ..ServingRules::default() };
        let program = Program::serving(&rules);
        assert_eq!(program, Program::serving(&rules));
        let device = Simulated::new(SimulatedOptions::default());
        let mut replay = program.replay(&device);
        while replay.step().is_some() {}
        let outcome = replay.outcome();
        assert_eq!(outcome.refused, 0);
        let blocks = outcome.live_requested.get() / rules.block_bytes.get();
        let most = 64 * (8192 + 1024) / 16;
        assert!((64..most).contains(&blocks), "{blocks} KV blocks are live");
        assert!(
            outcome.live_requested.is_aligned_to(terrane_core::Alignment::HUGE_PAGE),
            "scratch"
        );
    }
}
