//! Records the trace that the suite `pool` replays, and prints it on standard output; see
//! [`terrane_bench::recorded`].

use std::io;

use terrane_bench::recorded::SERVING;
use terrane_bench::replay::Program;
use terrane_pool::adaptors::{Adapt, TraceSink};
use terrane_testkit::simulated::{Simulated, SimulatedOptions};

fn main() -> anyhow::Result<()> {
    let sink = TraceSink::new(io::stdout());
    let traced = Simulated::new(SimulatedOptions::default()).traced(sink.clone());
    let outcome = Program::serving(&SERVING).replay(&traced).run();
    anyhow::ensure!(outcome.refused == 0, "the simulated device is too small");
    sink.flush()?;
    Ok(())
}
