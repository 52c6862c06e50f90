//! Copies between host memory and files, and between files.

mod bounce;
mod extents;
mod options;
mod rates;
mod request;
mod route;
mod segments;
mod worker;

use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use terrane_core::{Capability, CapabilityReport, OwnerProcess, Requirement};
use terrane_storage::{IoQueue, IoRegistration, IoWaker, StorageError};

use crate::checksums::crc;
use crate::engine::declined::Declined;
use crate::engine::job::CopyJob;
use crate::engine::quote::Quote;
use crate::engine::{CopyEngine, threads};
use crate::plan::TransferPlan;
use crate::side::Side;
use crate::transfer::TransferOptions;
pub use options::DiskEngineOptions;
use rates::DiskRates;
use route::DiskRoute;
use worker::{DiskWorker, buffer_sums};

/// Copies between host memory and files, and between files, with several requests in flight.
///
/// Runs that are adjacent in a file become one request, whatever the number of spans in memory. If
/// the file has direct I/O and the layout is aligned for it, requests bypass the page cache. If
/// only the memory's alignment is insufficient, they use aligned buffers. Otherwise requests use
/// the page cache. The choice applies to a whole layout, and endpoints [share no
/// page](crate::Endpoint::new) of a file. So no page is accessed with both direct and buffered I/O.
///
/// One thread, named `terrane-disk`, drives the queue. Dropping the engine lets the thread complete
/// all submitted jobs, and joins it. A drop on an engine's thread must not join others; the thread
/// then exits by itself.
pub struct DiskEngine {
    jobs: Option<Sender<CopyJob>>,
    waker: IoWaker,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
    rates: Arc<DiskRates>,
    capabilities: CapabilityReport,
    /// How strongly registered buffers were requested, and their state.
    registration: (Requirement, IoRegistration),
}

impl DiskEngine {
    /// Creates an engine with these options.
    ///
    /// # Errors
    ///
    /// [`StorageError`] if the queue cannot be created as the options require it, or the thread
    /// cannot be started.
    pub fn new(options: &DiskEngineOptions) -> Result<Self, StorageError> {
        let queue = IoQueue::new(&options.queue)?;
        let (waker, capabilities) = (queue.waker(), queue.capabilities().clone());
        let wanted = !options.queue.registered.is_zero();
        let requirement = if wanted { Requirement::Preferred } else { Requirement::Off };
        let registration = (requirement, queue.registration());
        let rates = Arc::new(DiskRates::new());
        let (jobs, inbox) = unbounded();
        let worker = DiskWorker::new(queue, inbox, options, Arc::clone(&rates));
        let thread = threads::spawn("terrane-disk".to_owned(), move || worker.serve())
            .map_err(|source| StorageError::Thread { source })?;
        let owner = OwnerProcess::current();
        let (jobs, thread) = (Some(jobs), Some(thread));
        Ok(Self { jobs, waker, thread, owner, rates, capabilities, registration })
    }

    /// The status of io_uring and of registered buffers, if they were requested. Registered buffers
    /// count as granted until the kernel refuses to register some memory.
    #[must_use]
    pub fn capabilities(&self) -> CapabilityReport {
        let mut report = self.capabilities.clone();
        let (requirement, registration) = &self.registration;
        report.record(Capability::RegisteredBuffers, *requirement, registration.status());
        report
    }
}

// SAFETY: the worker reads and writes only bytes of the runs, by requests with buffers and offsets
// from the plan. It finishes a job only after the queue has reported all of its requests.
unsafe impl CopyEngine for DiskEngine {
    fn name(&self) -> &'static str {
        "disk"
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        if !self.owner.is_current() {
            return Err(Declined::Forked);
        }
        let route = DiskRoute::of(plan)?;
        if options.device_order.is_some() {
            return Err(Declined::DeviceOrder);
        }
        // Copies between files use buffers, in the order of the source file.
        let has_order =
            || route.memory_side().is_some() || buffer_sums::is_canonical(plan, Side::Source);
        if options.checksums.is_some() && !has_order() {
            return Err(Declined::Checksums);
        }
        let route = self.rates.choose(route, plan);
        let predicted = self.rates.of(&route).predict(plan.bytes(), plan.run_count());
        Ok(Quote::new(predicted, route))
    }

    fn submit(&self, job: CopyJob) {
        // If the thread has exited, the job drops here, which notifies its caller.
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job);
            self.waker.wake();
        }
    }

    fn computes_checksums(&self) -> bool {
        crc::IS_COMPUTED
    }

    fn capabilities(&self) -> CapabilityReport {
        Self::capabilities(self)
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

terrane_core::debug_fields!(DiskEngine { rates });
