//! The prefill process, which has computed the blocks. It starts decode, and prints the report.

use std::env;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::channel::Channel;
use crate::cli::{Mode, Options};
use crate::decode::Verdict;
use crate::failure::Failure;
use crate::models;
use crate::moves::{Measured, Move};
use crate::report::{self, Line};
use crate::tier::LocalAgent;

/// Starts decode, moves the blocks of each group of the model, and prints the results.
pub fn run(options: &Options) -> Result<(), Failure> {
    let model = models::load(&options.model, options.tensor_parallel)?;
    let jobs = Move::all(options, &model)?;
    let local = LocalAgent::new(options)?;
    let mut decode = Decode::start()?;
    let moved = jobs.iter().map(|job| move_blocks(options, job, &local, &mut decode.channel));
    let lines: Vec<Line> = match moved.collect() {
        Ok(lines) => lines,
        // If the other process has ended, its failure is the cause.
        Err(failure) => return Err(decode.failure().unwrap_or(failure)),
    };
    decode.finish()?;
    report::print(options, &lines).map_err(Failure::Output)?;
    let (mismatches, bytes) = lines
        .iter()
        .fold((0, 0), |(wrong, all), line| (wrong + line.mismatches, all + line.checked_bytes));
    if mismatches > 0 { Err(Failure::Mismatch { mismatches, bytes }) } else { Ok(()) }
}

fn move_blocks(
    options: &Options,
    job: &Move,
    local: &LocalAgent,
    channel: &mut Channel<ChildStdout, ChildStdin>,
) -> Result<Line, Failure> {
    let tier = local.allocate(job.config)?;
    tier.fill(&job.computed)?;
    let mine = match options.mode {
        Mode::Write => {
            let decode = local.agent.import(&channel.receive()?)?;
            Some(job.run_rounds(options, local, &tier.endpoint, decode.endpoint())?)
        }
        Mode::Read => {
            channel.send(&local.agent.export(tier.endpoint.layout())?)?;
            // The blocks must not be used for anything else until then.
            job.wait_for_arrival(options, local)?;
            None
        }
    };
    let verdict: Verdict = channel.receive_json()?;
    let measured: Option<Measured> = mine.or(verdict.measured);
    let measured =
        measured.ok_or_else(|| Failure::Channel(std::io::ErrorKind::InvalidData.into()))?;
    Ok(Line {
        name: job.name.clone(),
        model: job.model.clone(),
        blocks: job.source.len(),
        layers: job.layers,
        measured,
        checked_bytes: verdict.checked_bytes,
        mismatches: verdict.mismatches,
    })
}

/// The decode process. Drop kills it.
struct Decode {
    child: Child,
    channel: Channel<ChildStdout, ChildStdin>,
}

impl Decode {
    /// Starts this program again, with the same options and the other role.
    fn start() -> Result<Self, Failure> {
        let program = env::current_exe().map_err(Failure::Start)?;
        let mut child = Command::new(program)
            .args(env::args_os().skip(1))
            .args(["--role", "decode"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Failure::Start)?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let missing = || Failure::Start(std::io::ErrorKind::BrokenPipe.into());
        let (input, output) = pipes.ok_or_else(missing)?;
        Ok(Self { child, channel: Channel::new(output, input) })
    }

    /// The failure of the process, if it has ended with one.
    fn failure(&mut self) -> Option<Failure> {
        // The process ends right after its last message, so a short wait is enough.
        let status = (0..100).find_map(|_| {
            let status = self.child.try_wait().ok()?;
            if status.is_none() {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            status
        });
        status.filter(|status| !status.success()).map(Failure::PeerEnded)
    }

    fn finish(mut self) -> Result<(), Failure> {
        let status = self.child.wait().map_err(Failure::Channel)?;
        if status.success() { Ok(()) } else { Err(Failure::PeerEnded(status)) }
    }
}

impl Drop for Decode {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
