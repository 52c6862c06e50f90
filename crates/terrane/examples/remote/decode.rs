//! The decode process: it exports its memory or reads prefill's blocks, and verifies every byte.

use std::io;

use serde::{Deserialize, Serialize};

use crate::channel::Channel;
use crate::cli::{Mode, Options};
use crate::failure::Failure;
use crate::models;
use crate::moves::{Measured, Move};
use crate::tier::LocalAgent;

/// The result of decode's check.
#[derive(Debug, Serialize, Deserialize)]
pub struct Verdict {
    pub checked_bytes: u64,
    pub mismatches: u64,
    /// The measurement, if decode executed the transfer.
    pub measured: Option<Measured>,
}

/// Runs decode for prefill, which started this process.
pub fn run(options: &Options) -> Result<(), Failure> {
    let model = models::load(&options.model, options.tensor_parallel)?;
    let mut channel = Channel::new(io::stdin().lock(), io::stdout().lock());
    let local = LocalAgent::new(options)?;
    for job in Move::all(options, &model)? {
        let tier = local.allocate(job.config)?;
        tier.fill(&job.poison)?;
        let measured = match options.mode {
            Mode::Write => {
                channel.send(&local.agent.export(tier.endpoint.layout())?)?;
                job.wait_for_arrival(options, &local)?;
                None
            }
            Mode::Read => {
                let prefill = local.agent.import(&channel.receive()?)?;
                Some(job.run_rounds(options, &local, prefill.endpoint(), &tier.endpoint)?)
            }
        };
        let (moved, layers) = (0..job.layers, job.config.num_layers());
        let arrived = tier.verify(&job.computed, &job.destination, &job.source, moved)?;
        // Layers that were not requested, and blocks that no process wrote to.
        let (to, rest) = (&job.destination, job.layers..layers);
        let untouched = [
            tier.verify(&job.poison, to, to, rest)?,
            tier.verify(&job.poison, &job.untouched_blocks, &job.untouched_blocks, 0..layers)?,
        ];
        let all = || untouched.iter().chain([&arrived]);
        channel.send_json(&Verdict {
            checked_bytes: all().map(|check| check.bytes.get()).sum(),
            mismatches: all().map(|check| check.mismatches).sum(),
            measured,
        })?;
    }
    Ok(())
}
