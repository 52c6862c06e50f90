//! Transfers, registrations and descriptions by Terrane, compared with NIXL's bindings alone. Both
//! use two agents of one process over UCX, and the same memory.

mod agents;
mod bindings;
mod interleave;
mod metadata;
mod processors;
mod registration;
mod setup;
mod terrane;
mod transfers;

use std::process::ExitCode;

use clap::Parser;
use terrane_bench::{Settings, run};
use terrane_core::ByteCount;

use agents::{Agents, Progress};
use processors::Processors;
use transfers::Amount;

/// Compares Terrane's transfers, descriptions and registrations with NIXL's bindings alone.
#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    settings: Settings,
    /// The larger of the two amounts, in MiB
    #[arg(long, default_value_t = 1024)]
    size_mib: u32,
    /// The number of sets of agents for each case; a quarter for the larger amount
    #[arg(long, value_name = "N", default_value_t = 16)]
    sets: u32,
    /// The pause of the agents' progress threads in microseconds, as in TERRANE_NIXL_PROGRESS. With `off`,
    /// agents that start transfers have no such thread, and agents that answer pause for 1000
    #[arg(long, value_name = "N", default_value = "1000")]
    progress: Progress,
    /// Lets the system choose the processors of threads. Otherwise the agents' threads run on one
    /// processor, and the transferring thread on one of another core. If that is not possible, a line on
    /// standard error reports it, and the system chooses
    #[arg(long)]
    unpinned: bool,
    /// Moves a few bytes a few times, to test the suite without a useful measurement
    #[arg(long, conflicts_with_all = ["size_mib", "sets"])]
    smoke: bool,
}

/// The maximum ratio of Terrane's time to that of the bindings alone.
const MOST_TIME: f64 = 1.02;

/// The amount in the smaller cases.
const SMALL: ByteCount = ByteCount::mib(64);

/// The amount in a smoke run. The longest pieces need it: scattering takes at least eight pieces.
const SMOKE: ByteCount = ByteCount::mib(16);

fn main() -> ExitCode {
    keep_ucx_off_standard_output();
    let mut arguments = Arguments::parse();
    let [small, large] = if arguments.smoke {
        arguments.settings.warm_up = 0;
        arguments.settings.repeats = 1;
        arguments.sets = 1;
        [SMOKE; 2]
    } else {
        [SMALL, ByteCount::mib(arguments.size_mib)]
    };
    run("nixl", &arguments.settings, |settings, reporter| {
        let processors = if arguments.unpinned { None } else { processors_apart() };
        let agents = Agents { progress: arguments.progress, sets: arguments.sets, processors };
        // Without NIXL, the bindings would end the process at their first call.
        terrane_nixl::probe()?;
        // Each set of agents has a part of the repeats of other suites.
        let of_set = Settings { repeats: settings.repeats.div_ceil(3), ..settings.clone() };
        // More repeats for calls of microseconds.
        let often = Settings { repeats: settings.repeats * 4, ..settings.clone() };
        transfers::measure(Amount::BLOCK, agents, &often, reporter)?;
        transfers::measure(Amount::LONE_BLOCK, agents, settings, reporter)?;
        transfers::measure(Amount::of(small), agents, &of_set, reporter)?;
        if large != small {
            // Long copies vary less and take longer, so fewer repeats are enough.
            let [warm_up, repeats] = [of_set.warm_up, of_set.repeats].map(|n| n.div_ceil(2));
            let of_set = Settings { warm_up, repeats, ..of_set.clone() };
            transfers::measure(Amount::of(large), agents.fewer(), &of_set, reporter)?;
        }
        metadata::measure(agents, &of_set, reporter)?;
        registration::measure(large, agents, settings, reporter)
    })
}

/// Selects processors for the threads, or reports why that is not possible.
#[expect(clippy::print_stderr, reason = "people read this; standard output is for figures")]
fn processors_apart() -> Option<Processors> {
    Processors::apart().inspect_err(|why| eprintln!("threads are not pinned: {why:#}")).ok()
}

/// Redirects the log of UCX to standard error, unless the user has set another file. By default UCX
/// logs to standard output, where the figures are.
#[expect(clippy::disallowed_methods, reason = "UCX is configured by its variables alone")]
fn keep_ucx_off_standard_output() {
    const LOG: &str = "UCX_LOG_FILE";
    if std::env::var_os(LOG).is_none() {
        // SAFETY: this is the first statement of the program, so no other thread reads the
        // environment.
        unsafe { std::env::set_var(LOG, "stderr") };
    }
}
