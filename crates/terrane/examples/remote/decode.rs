//! The process that goes on with the blocks: it offers room or takes them, and looks at every byte.

use std::io;

use serde::{Deserialize, Serialize};

use crate::channel::Channel;
use crate::cli::{Mode, Options};
use crate::failure::Failure;
use crate::models;
use crate::moves::{Measured, Move};
use crate::tier::Side;

/// The result of decode's check.
#[derive(Debug, Serialize, Deserialize)]
pub struct Verdict {
    pub looked_at: u64,
    pub mismatches: u64,
    /// If it was decode that moved.
    pub measured: Option<Measured>,
}

/// Serves prefill, which started this process.
pub fn run(options: &Options) -> Result<(), Failure> {
    let model = models::load(&options.model, options.tensor_parallel)?;
    let mut channel = Channel::new(io::stdin().lock(), io::stdout().lock());
    let side = Side::new(options)?;
    for job in Move::all(options, &model)? {
        let tier = side.allocate(job.config)?;
        tier.fill(&job.poison)?;
        let measured = match options.mode {
            Mode::Write => {
                channel.send(&side.agent.export(tier.endpoint.layout())?)?;
                job.arrived(options, &side)?;
                None
            }
            Mode::Read => {
                let prefill = side.agent.import(&channel.receive()?)?;
                Some(job.make(options, &side, prefill.endpoint(), &tier.endpoint)?)
            }
        };
        let (moved, layers) = (0..job.layers, job.config.num_layers());
        let arrived = tier.verify(&job.computed, &job.destination, &job.source, moved)?;
        // Layers that were not asked for, and blocks that no process wrote to.
        let (to, rest) = (&job.destination, job.layers..layers);
        let untouched = [
            tier.verify(&job.poison, to, to, rest)?,
            tier.verify(&job.poison, &job.others, &job.others, 0..layers)?,
        ];
        let all = || untouched.iter().chain([&arrived]);
        channel.tell(&Verdict {
            looked_at: all().map(|seen| seen.bytes.get()).sum(),
            mismatches: all().map(|seen| seen.mismatches).sum(),
            measured,
        })?;
    }
    Ok(())
}
