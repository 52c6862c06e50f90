//! The copy itself.

use std::thread;
use std::time::Duration;

use terrane_core::{BoxedCause, ByteCount};
use terrane_transfer::{CopyFailure, CopyJob, CopyRun, Side, TransferPlan};

use super::layers::LayerReports;
use super::options::{Fault, InjectedFault, SimulatedEngineOptions};
use crate::pattern::pointer;
use crate::random::Seeded;

pub(super) fn execute(
    job: CopyJob,
    fault: Option<Fault>,
    mut random: Seeded,
    options: &SimulatedEngineOptions,
) {
    if let Some(failure) = job.reason_to_stop() {
        return job.finish(Err(failure));
    }
    job.start();
    let order = order(&job, &mut random, options.reorder_runs);
    let runs = order.len();
    let mut layer_reports = LayerReports::default();
    let stop_at = match fault {
        None => None,
        Some(Fault::ShortCopy { after_runs }) => Some(after_runs.min(runs.saturating_sub(1))),
        Some(Fault::Engine | Fault::Hang) => Some(0),
        Some(Fault::DropJob) => Some(runs / 2),
    };
    for (done, &index) in order.iter().enumerate() {
        if let Some(failure) = job.reason_to_stop() {
            return job.finish(Err(failure));
        }
        if stop_at == Some(done) {
            break;
        }
        pause(&mut random, options.longest_delay);
        let run = &job.plan().runs()[index];
        layer_reports.before(&job, index);
        if let Err(source) = copy(job.plan(), run, run.bytes()) {
            let offset = ByteCount::ZERO;
            return job.finish(Err(CopyFailure::Run { index, offset, source }));
        }
        job.progress().add(run.bytes());
        layer_reports.after(&job, index, &mut random);
    }
    let Some(fault) = fault else { return job.finish(Ok(())) };
    let source = Box::new(InjectedFault(fault));
    match fault {
        Fault::ShortCopy { .. } => {
            let Some(&index) = stop_at.and_then(|at| order.get(at)) else {
                return job.finish(Err(CopyFailure::Engine { source }));
            };
            let run = &job.plan().runs()[index];
            let half = ByteCount::new(run.bytes().get() / 2);
            let copied = copy(job.plan(), run, half);
            let source = copied.err().unwrap_or(source);
            job.finish(Err(CopyFailure::Run { index, offset: half, source }));
        }
        Fault::Engine | Fault::Hang => job.finish(Err(CopyFailure::Engine { source })),
        Fault::DropJob => drop(job),
    }
}

/// The order in which runs are copied. A layer-by-layer job copies one layer after the other.
fn order(job: &CopyJob, random: &mut Seeded, reorder: bool) -> Vec<usize> {
    let plan = job.plan();
    let mut order: Vec<usize> = (0..plan.runs().len()).collect();
    if reorder {
        random.shuffle(&mut order);
        if job.layers().is_some() {
            let mut layers: Vec<u32> = plan.layers().collect();
            random.shuffle(&mut layers);
            let place = |layer: u32| layers.iter().position(|&other| other == layer);
            order.sort_by_key(|&run| place(plan.layer(run)));
        }
    }
    order
}

fn copy(plan: &TransferPlan, run: &CopyRun, bytes: ByteCount) -> Result<(), BoxedCause> {
    let at = |side| plan.location(run, side).expect("a run of this plan");
    let from = pointer(at(Side::Source), bytes.to_usize())?;
    let to = pointer(at(Side::Destination), bytes.to_usize())?;
    // SAFETY: the plan was validated. Both spans are in live memory, which the job keeps alive, and
    // they do not overlap. No other transfer in flight uses the destination.
    unsafe { from.copy_to_nonoverlapping(to, bytes.to_usize()) };
    Ok(())
}

fn pause(random: &mut Seeded, longest: Duration) {
    if !longest.is_zero() {
        let nanoseconds = u64::try_from(longest.as_nanos()).expect("a delay of a test is short");
        thread::sleep(Duration::from_nanos(random.next_u64() % (nanoseconds + 1)));
    }
}
