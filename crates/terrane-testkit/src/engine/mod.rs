//! A copy engine whose order, delays and failures are controlled by a test.

mod execute;
mod layers;
mod options;

pub use options::{Fault, InjectedFault, SimulatedEngineOptions};

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use terrane_core::sync::{lock, unpoisoned};
use terrane_core::{BoxedCause, StorageKind};
use terrane_transfer::engines::threads;
use terrane_transfer::{
    CopyEngine, CopyFailure, CopyJob, Declined, DeviceOrder, OnlyPath, Orphaned, Quote,
    TransferOptions, TransferPlan,
};

use crate::device::{self, Gate};
use crate::random::Seeded;

/// Copies between host memory and simulated devices on its own threads, as
/// [`SimulatedEngineOptions`] state.
///
/// In layer-by-layer transfers it reports each layer, in an order that the seed determines. If a
/// device takes part, it reports an event of a simulated stream. It also reports that the layer is
/// complete, but sometimes leaves that out, as engines may.
///
/// While it [holds](Self::hold) jobs back, they stay in flight until the test
/// [releases](Self::release) them one by one. On drop, it executes the jobs that neither the test
/// nor a stream holds back, and drops the others unfinished. It then joins its threads, unless it
/// drops on a thread of an engine.
#[derive(Debug)]
pub struct SimulatedEngine {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    options: SimulatedEngineOptions,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<Queued>,
    /// The number of jobs that may still start; `None` for any number.
    permits: Option<usize>,
    faults: VecDeque<Fault>,
    /// Jobs whose copies never end.
    hung: Vec<CopyJob>,
    /// The orphaned remains of such jobs.
    remains: Vec<Orphaned>,
    random: Seeded,
    running: usize,
    ended: usize,
    closed: bool,
}

#[derive(Debug)]
struct Queued {
    job: CopyJob,
    gate: Gate,
}

/// The interval at which a worker checks the streams that jobs wait for.
const GATE_INTERVAL: Duration = Duration::from_micros(200);

impl Default for SimulatedEngine {
    fn default() -> Self {
        Self::new(SimulatedEngineOptions::default())
    }
}

impl SimulatedEngine {
    /// Creates an engine with these options.
    #[must_use]
    pub fn new(options: SimulatedEngineOptions) -> Self {
        let state = State {
            queue: VecDeque::new(),
            permits: None,
            faults: VecDeque::new(),
            hung: Vec::new(),
            remains: Vec::new(),
            random: Seeded::new(options.seed),
            running: 0,
            ended: 0,
            closed: false,
        };
        let threads = options.threads.get();
        let shared =
            Arc::new(Shared { options, state: Mutex::new(state), changed: Condvar::new() });
        let start = |number| {
            let shared = Arc::clone(&shared);
            threads::spawn(format!("simulated-{number}"), move || shared.work()).expect("a thread")
        };
        let workers = (0..threads).map(start).collect();
        Self { shared, workers }
    }

    /// Makes jobs wait until they are released.
    pub fn hold(&self) {
        lock(&self.shared.state).permits = Some(0);
    }

    /// Lets the next `jobs` jobs start, whether they are held or not submitted yet.
    pub fn release(&self, jobs: usize) {
        if let Some(permits) = &mut lock(&self.shared.state).permits {
            *permits += jobs;
        }
        self.shared.changed.notify_all();
    }

    /// Lets all jobs start, now and later.
    pub fn release_all(&self) {
        lock(&self.shared.state).permits = None;
        self.shared.changed.notify_all();
    }

    /// Sets the fault of the next job that starts. Several calls apply to several jobs in order.
    pub fn fail_next(&self, fault: Fault) {
        lock(&self.shared.state).faults.push_back(fault);
    }

    /// The number of jobs that hang: their copies never end.
    #[must_use]
    pub fn hung(&self) -> usize {
        lock(&self.shared.state).hung.len()
    }

    /// Orphans all jobs that hang. Their copies may continue.
    pub fn orphan_hung(&self) {
        let hung = std::mem::take(&mut lock(&self.shared.state).hung);
        for job in hung {
            let source = Box::new(InjectedFault(Fault::Hang));
            let remains = job.orphan(CopyFailure::Engine { source });
            lock(&self.shared.state).remains.push(remains);
        }
    }

    /// Ends the copies of all orphaned jobs.
    pub fn end_orphaned(&self) {
        let remains = std::mem::take(&mut lock(&self.shared.state).remains);
        drop(remains);
    }

    /// The number of jobs that were submitted and have not started.
    #[must_use]
    pub fn queued(&self) -> usize {
        lock(&self.shared.state).queue.len()
    }

    /// The number of jobs that have ended.
    #[must_use]
    pub fn ended(&self) -> usize {
        lock(&self.shared.state).ended
    }

    /// Waits until no job runs or could start.
    pub fn wait_until_idle(&self) {
        let idle = |state: &mut State| {
            state.running > 0 || (!state.queue.is_empty() && state.permits != Some(0))
        };
        let state = lock(&self.shared.state);
        drop(unpoisoned(self.shared.changed.wait_while(state, idle)));
    }
}

const PATH: OnlyPath =
    OnlyPath { path: "simulated copy", reason: "it is the only path of a simulated engine" };

// SAFETY: `execute` accesses only the bytes of a plan's runs. It owns the job, and finishes or
// drops it last.
unsafe impl CopyEngine for SimulatedEngine {
    fn name(&self) -> &'static str {
        self.shared.options.name
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        let own = &self.shared.options;
        let kinds = (plan.source().kind(), plan.destination().kind());
        let within_reach = |kind: StorageKind| kind.is_host() || kind.is_device();
        if !within_reach(kinds.0) || !within_reach(kinds.1) || !(own.serves)(kinds.0, kinds.1) {
            return Err(Declined::Kinds);
        }
        if Gate::of(options.device_order.as_ref()).is_none() {
            return Err(Declined::DeviceOrder);
        }
        Ok(Quote::constant(own.predicted, &PATH))
    }

    fn submit(&self, job: CopyJob) {
        let gate = Gate::of(job.options().device_order.as_ref()).unwrap_or_default();
        lock(&self.shared.state).queue.push_back(Queued { job, gate });
        self.shared.changed.notify_all();
    }

    fn capture_order(&self, order: &DeviceOrder) -> Result<DeviceOrder, BoxedCause> {
        let event = device::capture(order).ok_or(Declined::DeviceOrder)?;
        Ok(event.into_order())
    }
}

impl Drop for SimulatedEngine {
    fn drop(&mut self) {
        lock(&self.shared.state).closed = true;
        self.shared.changed.notify_all();
        threads::join(self.workers.drain(..));
    }
}

impl Shared {
    /// The loop of each thread, until the engine is closed.
    fn work(&self) {
        while let Some((job, fault, random)) = self.next_job() {
            let hangs = fault == Some(Fault::Hang);
            let mut hung = None;
            if hangs {
                hung = Some(job);
            } else {
                execute::execute(job, fault, random, &self.options);
            }
            let mut state = lock(&self.state);
            state.running -= 1;
            state.ended += usize::from(!hangs);
            state.hung.extend(hung);
            drop(state);
            self.changed.notify_all();
        }
        let held = std::mem::take(&mut lock(&self.state).queue);
        drop(held);
    }

    /// Waits for a job that may start; `None` when the engine is closed and no job remains.
    fn next_job(&self) -> Option<(CopyJob, Option<Fault>, Seeded)> {
        let mut state = lock(&self.state);
        loop {
            if let Some(index) = state.choose(self.options.reorder_jobs) {
                let job = state.queue.remove(index).expect("an index of the queue").job;
                if let Some(permits) = &mut state.permits {
                    *permits -= 1;
                }
                state.running += 1;
                let seed = state.random.next_u64();
                return Some((job, state.faults.pop_front(), Seeded::new(seed)));
            }
            if state.closed {
                // The test or a stream holds back the remaining jobs.
                return None;
            }
            state = if state.queue.is_empty() || state.permits == Some(0) {
                unpoisoned(self.changed.wait(state))
            } else {
                let waited = self.changed.wait_timeout(state, GATE_INTERVAL);
                unpoisoned(waited).0
            };
        }
    }
}

impl State {
    /// One of the jobs that may start: the first, or any.
    fn choose(&mut self, any: bool) -> Option<usize> {
        if self.permits == Some(0) {
            return None;
        }
        let open = self.queue.iter().enumerate().filter(|(_, queued)| queued.gate.is_open());
        let open: Vec<_> = open.map(|(index, _)| index).collect();
        let choice = if any { self.random.below(open.len()) } else { 0 };
        open.get(choice).copied()
    }
}
