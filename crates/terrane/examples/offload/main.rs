//! Offloads KV blocks of a real model from the compute tier to host memory and to disk, and
//! restores them to other block ids. Every byte is verified. The output has the rate of each hop
//! and the machine's own limit. With a GPU, the compute tier is its memory, and the host tier is
//! pinned memory.
//!
//! `cargo run --release --example offload`; `-- --help` lists the options.

mod cli;
mod console;
mod device;
mod failure;
mod job;
mod limits;
mod machine;
mod models;
mod progress;
mod tiers;

use std::process::ExitCode;

use clap::Parser;

use cli::Options;
use console::Console;
use failure::Failure;

fn main() -> ExitCode {
    let options = Options::parse();
    let mut console = Console::new(options.json, options.verbose);
    match run(&options, &mut console) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of the output has closed the pipe, as in `offload | head`.
        Err(failure) if failure.is_closed_pipe() => ExitCode::FAILURE,
        Err(failure) => {
            console.fail(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(options: &Options, console: &mut Console) -> Result<(), Failure> {
    let model = models::load(&options.model, options.tensor_parallel)?;
    let job = job::Job::prepare(options, &model, console)?;
    let hops = job.run(console)?;
    console.table(&hops)?;
    let failed = hops.iter().filter(|hop| !hop.verified).count();
    if failed > 0 {
        return Err(Failure::Mismatch { failed, hops: hops.len() });
    }
    Ok(())
}
