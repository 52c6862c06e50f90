//! Copies between host memory and files, and between files.

mod bounce;
mod choice;
mod extents;
mod request;
mod route;
mod worker;

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use terrane_core::{ByteCount, CapabilityReport, OwnerProcess};
use terrane_storage::{IoQueue, IoQueueOptions, IoWaker, StorageError};

use crate::engines::threads;
use crate::{CopyEngine, CopyJob, Declined, Quote, Terms, TransferPlan};
use choice::Rates;
use route::Route;
use worker::Worker;

/// Copies between host memory and files, and between files, with several requests in flight.
///
/// Runs that follow one another in a file become one request, whatever number of places in memory
/// they come from or go to. Where the file has direct I/O and the layout's alignment allows it,
/// requests go around the page cache; where only the memory's alignment is in the way, by way of
/// aligned buffers; otherwise through the page cache. The choice is a layout's, not a run's, and
/// endpoints [share no page](crate::Endpoint::new) of a file, so that no page is ever reached both
/// ways at once.
///
/// One thread, named `terrane-disk`, drives all of it. Dropping the engine lets the thread finish
/// what was submitted, and joins it, unless it drops on a thread of an engine, which must not wait
/// for others: then it ends by itself.
pub struct DiskEngine {
    jobs: Option<Sender<CopyJob>>,
    waker: IoWaker,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
    rates: Arc<Rates>,
    capabilities: CapabilityReport,
}

/// The options of a [`DiskEngine`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskEngineOptions {
    /// The queue: its depth, and whether it is io_uring's.
    pub queue: IoQueueOptions,
    /// The most bytes of one request. A multiple of 4 KiB, or it is rounded up to one.
    pub request: ByteCount,
    /// How many such requests there are buffers for, for copies that do not go directly. A buffer
    /// has 1 MiB at most, so a longer request becomes several; there are no more buffers than the
    /// queue is deep, and always one. They are allocated with the first such copy.
    pub bounce_buffers: usize,
}

impl Default for DiskEngineOptions {
    /// A queue of 32, requests of up to 4 MiB, buffers for 16 of them: 32 of 1 MiB.
    ///
    /// 4 MiB holds a block of nearly every model, so that a block is one request; a deeper queue
    /// gained nothing on the disks at hand.
    fn default() -> Self {
        Self { queue: IoQueueOptions::default(), request: ByteCount::mib(4), bounce_buffers: 16 }
    }
}

impl DiskEngine {
    /// An engine with these options.
    ///
    /// # Errors
    ///
    /// [`StorageError`] if the queue cannot be had as the options require it, or the thread cannot
    /// be started.
    pub fn new(options: &DiskEngineOptions) -> Result<Self, StorageError> {
        let queue = IoQueue::new(&options.queue)?;
        let (waker, capabilities) = (queue.waker(), queue.capabilities().clone());
        let rates = Arc::new(Rates::new());
        let (jobs, inbox) = unbounded();
        let worker = Worker::new(queue, inbox, options, Arc::clone(&rates));
        let thread = threads::spawn("terrane-disk".to_owned(), move || worker.serve())
            .map_err(|source| StorageError::Thread { source })?;
        let owner = OwnerProcess::current();
        Ok(Self { jobs: Some(jobs), waker, thread: Some(thread), owner, rates, capabilities })
    }

    /// Whether io_uring was wished for, and what became of that.
    #[must_use]
    pub fn capabilities(&self) -> &CapabilityReport {
        &self.capabilities
    }
}

// SAFETY: the worker reads and writes the bytes of the runs only, by requests whose buffers and
// offsets come from the plan, and finishes a job when the queue has reported all its requests.
unsafe impl CopyEngine for DiskEngine {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined> {
        if !self.owner.is_current() {
            return Err(Declined::Forked);
        }
        let route = Route::of(plan)?;
        if terms.device_order.is_some() {
            return Err(Declined::DeviceOrder);
        }
        let route = self.rates.choose(route, plan);
        Ok(Quote {
            path: route.path().into(),
            reason: route.reason(),
            predicted: self.rates.of(&route).predict(plan.bytes(), plan.run_count()),
        })
    }

    fn submit(&self, job: CopyJob) {
        // Should the thread be gone, the job drops here, which tells its caller.
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
            self.waker.wake();
        }
    }

    fn capabilities(&self) -> CapabilityReport {
        self.capabilities.clone()
    }
}

impl Drop for DiskEngine {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return threads::leave((self.jobs.take(), self.thread.take()));
        }
        self.jobs = None;
        self.waker.wake();
        threads::join(self.thread.take());
    }
}

impl fmt::Debug for DiskEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskEngine").field("rates", &self.rates).finish_non_exhaustive()
    }
}
