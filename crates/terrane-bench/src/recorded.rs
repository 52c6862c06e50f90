//! The recorded trace of a serving engine that the suite `pool` replays.
//!
//! The tracing adaptor [`Trace`](terrane_pool::adaptors::Trace) wrote `data/serving.csv`. The
//! recorded program was the model of a serving engine with the rules [`SERVING`] over simulated
//! memory. The columns are those of RMM's logs, and any log with these columns can replace it. To
//! record it again:
//!
//! ```text
//! cargo run --release -p terrane-bench --example record_serving > crates/terrane-bench/data/serving.csv
//! ```

use terrane_core::ByteCount;
use terrane_pool::adaptors::TraceReader;

use crate::replay::{Program, ReplayError, ServingRules};

/// The rules of the recorded engine: the defaults with fewer and shorter sequences, so that the
/// file stays small.
pub const SERVING: ServingRules = ServingRules {
    engine_steps: 300,
    batch: 12,
    longest_prompt: 1024,
    longest_output: 256,
    page_size: 16,
    block_bytes: ByteCount::mib(2),
    activation_bytes: ByteCount::kib(8),
    logit_bytes: ByteCount::new(2 * 128_256),
    seed: 2026,
};

/// The recorded trace as a program.
///
/// # Errors
///
/// [`ReplayError`], if the file has been changed.
pub fn serving() -> Result<Program, ReplayError> {
    Program::from_events(TraceReader::new(include_bytes!("../data/serving.csv").as_slice())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recording_has_the_stated_engine() {
        let recorded = serving().unwrap();
        let model = Program::serving(&SERVING);
        let (ran, at_the_end) = recorded.steps().split_at(model.steps().len());
        assert_eq!(ran, model.steps());
        let frees = at_the_end.iter();
        assert!(
            frees.clone().all(|step| matches!(step, crate::replay::Step::Free { .. })),
            "blocks that were live at the end of the recording are freed"
        );
        assert!(!at_the_end.is_empty());
    }
}
