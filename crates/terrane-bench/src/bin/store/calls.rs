//! The time of calls: a submit of spans compared with blocks, and a hit in the host tier.

use std::io::Write;
use std::ptr::NonNull;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use terrane_bench::{Direction, Measurement, Reporter, Settings, Spread};
use terrane_core::ByteCount;
use terrane_store::{BlockGroup, Blocks, JobOptions, Spans, Store};
use terrane_transfer::{Endpoint, Transfer};

use crate::{Arguments, memory};

/// The number of blocks of a job.
const BLOCKS: u32 = 128;
const BLOCK: u32 = 64 << 10;

/// The number of jobs that a repeat measures.
const JOBS_OF_A_REPEAT: u32 = 200;

/// The maximum ratio of the time of a call to its baseline.
const AT_MOST: f64 = 1.2;

pub fn measure<W: Write>(
    arguments: &Arguments,
    settings: &Settings,
    reporter: &mut Reporter<W>,
) -> Result<()> {
    let spans = format!("submit of {BLOCKS} spans");
    let hit = "hit in the host tier, one block, submit";
    let end_of_hit = "hit in the host tier, one block, to its end";
    let wants_hit = reporter.wants(hit) || reporter.wants(end_of_hit);
    if !reporter.wants(&spans) && !wants_hit {
        return Ok(());
    }
    let memory = memory::memory(BLOCKS, BLOCK)?;
    let keys = memory::keys(1, BLOCKS);
    let ids: Vec<u32> = (0..BLOCKS).collect();
    // Jobs are short, and an idle CPU takes longer to wake in some periods than in others. So each
    // repeat measures many jobs.
    let repeats = settings.repeats.max(1).saturating_mul(JOBS_OF_A_REPEAT);
    if reporter.wants(&spans) {
        // Gets from disk, because their submission copies nothing.
        let folder = tempfile::tempdir_in(&arguments.directory)?;
        let store = memory::disk_store(folder.path(), &memory, BLOCKS)?;
        memory::put(&store, &keys, &memory, &ids)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..repeats {
            for is_ours in [round % 2 == 0, round % 2 != 0] {
                let blocks = if is_ours { spans_of(&memory)? } else { Blocks::new(&memory, &ids) };
                let begun = Instant::now();
                let job = store.get(&keys, blocks, JobOptions::new(), ());
                let seconds = begun.elapsed().as_secs_f64();
                memory::finish(job)?;
                if is_ours { ours.push(seconds) } else { theirs.push(seconds) }
            }
        }
        let baseline = format!("{BLOCKS} blocks of an endpoint");
        let row = compared(&spans, &baseline, &ours, &theirs)?;
        reporter.report(&row.at_least(1.0 / AT_MOST))?;
    }
    if wants_hit {
        let group = BlockGroup::of_layout("kv", memory.layout());
        let (store, _) = Store::builder().group(group).host(ByteCount::mib(32)).open()?;
        memory::put(&store, &keys, &memory, &ids)?;
        let manager = memory::manager()?;
        let source = memory::memory(1, BLOCK)?;
        let [mut submits, mut ends] = <[[Vec<f64>; 2]; 2]>::default();
        for round in 0..repeats {
            for is_ours in [round % 2 == 0, round % 2 != 0] {
                let begun = Instant::now();
                let submitted = if is_ours {
                    let to = Blocks::new(&memory, &[5]);
                    let job = store.get(&keys[5..6], to, JobOptions::new(), ());
                    let submitted = begun.elapsed();
                    memory::finish(job)?;
                    submitted
                } else {
                    let transfer = Transfer::new(&source, &memory).blocks(&[0], &[5]);
                    let completion = manager.submit(transfer, ());
                    let submitted = begun.elapsed();
                    completion.map_err(|rejected| anyhow!(rejected.cause))?.wait().result?;
                    submitted
                };
                let ended = begun.elapsed();
                for ([ours, theirs], time) in [(&mut submits, submitted), (&mut ends, ended)] {
                    let times = if is_ours { ours } else { theirs };
                    times.push(time.as_secs_f64());
                }
            }
        }
        let [ours, theirs] = submits;
        let row = compared(hit, "submit of the transfer alone", &ours, &theirs)?;
        reporter.report(&row.at_least(1.0 / AT_MOST))?;
        let [ours, theirs] = ends;
        let row = compared(end_of_hit, "the transfer alone", &ours, &theirs)?;
        // The thread that waits for a transfer copies itself.
        reporter.report(&row.without_target("another thread copies, and wakes the caller"))?;
    }
    Ok(())
}

/// A row of times in microseconds beside those of a baseline.
fn compared(case: &str, baseline: &str, ours: &[f64], theirs: &[f64]) -> Result<Measurement> {
    let micros = |seconds| Some(Spread::of(seconds)?.scaled(1e6));
    let ours = micros(ours).context("nothing was measured")?;
    let theirs = micros(theirs).context("nothing was measured")?;
    let row = Measurement::new(case, ours, "us", Direction::LowerIsBetter);
    Ok(row.with_baseline(baseline, theirs.median))
}

/// Returns the memory of all blocks as one span for each block.
#[expect(unsafe_code, reason = "the spans are memory of the endpoint")]
fn spans_of(memory: &Endpoint) -> Result<Blocks> {
    let base = memory.bases().first().and_then(|base| base.as_host());
    let base = base.context("no host memory")?.as_ptr();
    let bytes = usize::try_from(BLOCK)?;
    let mut spans = Spans::new();
    for index in 0..usize::try_from(BLOCKS)? {
        let start = NonNull::new(base.wrapping_add(index * bytes));
        spans.add(start.context("outside memory")?, bytes);
    }
    // SAFETY: the endpoint outlives the job, and only this job uses its memory during the job.
    Ok(unsafe { Blocks::spans(spans) })
}
