//! Copies by two other engines, through memory that both of them access.

mod bounce;
mod chunks;
mod engine_queues;
mod hop;
mod message;
mod options;
mod part_invitations;
mod route;
mod slot;
mod step;
mod sums;
mod transfer_state;
mod worker;

pub use bounce::RelaySlots;
pub use options::RelayOptions;
pub use step::{RelayStep, StepFailed};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use terrane_core::{Allocate, BoxedCause, ByteCount, OwnerProcess};

use crate::checksums::crc;
use crate::engine::declined::Declined;
use crate::engine::job::{CopyFailure, CopyJob};
use crate::engine::order::DeviceOrder;
use crate::engine::quote::Quote;
use crate::engine::{CopyEngine, threads};
use crate::error::TransferError;
use crate::plan::TransferPlan;
use crate::plan::planner::Planner;
use crate::transfer::TransferOptions;
use bounce::BounceSlots;
use hop::PartProgress;
use message::{Message, NewTransfer};
use options::NAME;
use part_invitations::PartInvitations;
use route::{RelayRoute, RelayShared, has_order};
use step::{PartId, RelayFailure};
use worker::RelayWorker;

/// Copies between two kinds of storage that no single engine connects, through memory of a third
/// kind. Examples are a device and a file through pinned memory, or pageable memory and a device.
///
/// A transfer is divided into chunks. One of the two engines copies each into a bounce slot, and
/// the other one copies it out. The second hop of some chunks overlaps with the first hop of the
/// next. An engine has only a few chunks at a time, because many at once would all end late. The
/// relay queries which engine can copy which hop, so one relay serves both directions.
///
/// # Slots
///
/// All transfers share the slots. The first is allocated with the engine, because quotes are
/// planned with it. The relay's thread allocates the others on demand, and [`trim`](Self::trim)
/// frees idle ones. A chunk needs one slot and nothing else, so every slot returns. Transfers take
/// turns, one chunk each. If the allocator refuses more slots, transfers continue with the existing
/// ones, which [`slots`](Self::slots) reports.
///
/// # Options of a transfer
///
/// The relay waits for a device order once, as of the submission, before the first chunk begins; no
/// slot is in use meanwhile. Files are made durable once, after the last chunk. The deadline
/// applies to every part, and to a transfer that waits for its turn. So does a cancellation: no
/// chunk begins after it. Progress counts bytes that have arrived at the destination. If a hop
/// fails, the transfer ends once none of its parts is in flight. Its error names the blocks, and
/// its cause is [`StepFailed`].
///
/// # Copies that cannot be stopped
///
/// An engine may [orphan](CopyJob::orphan) a part that does not complete. The transfer then ends
/// with that failure. Its blocks stay claimed until the engine knows that the copy has ended, and
/// the relay no longer uses the slot of the part ([`RelaySlots::orphaned`]). Another slot is
/// allocated on demand. If no slot is left and that allocation fails, transfers fail.
///
/// Until the part is orphaned, it keeps its slot and its place among the few chunks of its engine.
/// So without a deadline of the transfer or of the engine, a peer that hangs delays other
/// transfers.
///
/// # Threads
///
/// One thread, named `terrane-relay`, plans the parts and submits them to the engines; it copies no
/// bytes itself. It also ends the transfers, so the values that drop with one must not wait for
/// another ([`TransferManager::submit`](crate::TransferManager::submit)). Dropping the engine lets
/// the thread complete all submitted transfers, and joins it. A drop on an engine's thread must not
/// join others; the thread then exits by itself.
///
/// ```
/// use std::sync::Arc;
///
/// use terrane_core::StorageKind;
/// use terrane_storage::{SystemAllocator, SystemOptions};
/// use terrane_transfer::TransferManager;
/// use terrane_transfer::engines::{
///     DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let host = Arc::new(HostEngine::new(HostEngineOptions::default())?);
/// let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default())?);
/// // A program passes the engine of its device here, and an allocator of pinned memory.
/// let device = host.clone();
/// let bounce = SystemAllocator::new(SystemOptions::default());
/// let options = RelayOptions::default();
/// let to_disk = RelayEngine::new(device.clone(), disk.clone(), bounce.clone(), &options)?;
/// let to_system = RelayEngine::new(device.clone(), host.clone(), bounce, &options)?;
/// // The manager prefers one engine to a relay, because its predicted time is shorter.
/// let manager =
///     TransferManager::new([host as _, disk as _, Arc::new(to_disk) as _, Arc::new(to_system) as _]);
/// # drop(manager);
/// # Ok(())
/// # }
/// ```
pub struct RelayEngine {
    shared: Arc<RelayShared>,
    messages: Sender<Message>,
    next: AtomicU64,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
}

impl RelayEngine {
    /// Creates an engine that copies with these two engines, in any order, through memory from
    /// `bounce`.
    ///
    /// # Errors
    ///
    /// [`TransferError::EngineNotStarted`] if the first slot cannot be allocated, or the thread
    /// cannot be started.
    pub fn new(
        first: Arc<dyn CopyEngine>,
        second: Arc<dyn CopyEngine>,
        bounce: impl Allocate + Send + Sync + 'static,
        options: &RelayOptions,
    ) -> Result<Self, TransferError> {
        let bounce = BounceSlots::new(bounce, options)
            .map_err(|source| TransferError::not_started(NAME, source))?;
        let shared =
            Arc::new(RelayShared { engines: [first, second], bounce, planner: Planner::new() });
        let (messages, inbox) = unbounded();
        let worker = RelayWorker::new(Arc::clone(&shared), inbox, messages.clone());
        let thread = threads::spawn("terrane-relay".to_owned(), move || worker.serve())
            .map_err(|source| TransferError::not_started(NAME, source))?;
        let (next, owner) = (AtomicU64::new(0), OwnerProcess::current());
        Ok(Self { shared, messages, next, thread: Some(thread), owner })
    }

    /// The numbers of slots. In a process that was forked from the engine's process, they are zero.
    #[must_use]
    pub fn slots(&self) -> RelaySlots {
        if self.owner.is_current() { self.shared.bounce.slots() } else { RelaySlots::default() }
    }

    /// Frees idle slots except one, and returns the number of bytes freed. Slots are allocated
    /// again on demand.
    ///
    /// A process that was forked from the engine's process frees nothing.
    pub fn trim(&self) -> ByteCount {
        if self.owner.is_current() { self.shared.bounce.trim() } else { ByteCount::ZERO }
    }

    fn begin(&self, transfer: NewTransfer) {
        // If the thread has exited, the job drops here, which notifies its caller.
        let _ = self.messages.send(Message::NewTransfer(Box::new(transfer)));
    }

    /// Creates the part that waits for the device order of a job.
    fn order(
        &self,
        route: &RelayRoute,
        job: &CopyJob,
        transfer: u64,
    ) -> Result<CopyJob, RelayFailure> {
        let part = PartId { transfer, step: RelayStep::Order, chunk: 0 };
        let engine = self.shared.engine(route, part.step);
        let plan = self.shared.empty_plan(route, job.plan(), part.step)?;
        let (device_order, deadline) = (job.options().device_order.clone(), job.options().deadline);
        let options = TransferOptions { device_order, deadline, ..TransferOptions::default() };
        let invitations = Arc::new(PartInvitations::new(job.waiters()));
        let progress = PartProgress { copied: Arc::default(), invitations };
        hop::job(engine, job.claims(), plan, options, progress, part, &self.messages)
    }
}

// SAFETY: the engine accesses no byte itself. Its parts, which other engines execute, copy between
// the blocks of the job's plan and slots. Each slot belongs to one part at a time. The engine
// finishes the job when every part has ended; a lost part reports its end as it drops. An orphaned
// part may still access its blocks and its slot. Its orphan owns these and the job's claims, and
// the slot is never used again.
unsafe impl CopyEngine for RelayEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        if !self.owner.is_current() {
            return Err(Declined::Forked);
        }
        Ok(self.shared.route(plan, options)?.into_quote())
    }

    /// A quote declines checksums that neither of the two engines computes.
    fn computes_checksums(&self) -> bool {
        crc::IS_COMPUTED
    }

    fn submit(&self, job: CopyJob) {
        // Relaxed: only uniqueness is needed.
        let transfer = self.next.fetch_add(1, Ordering::Relaxed);
        let route = match job.decision::<RelayRoute>() {
            Ok(route) => route.clone(),
            Err(foreign) => {
                return job.finish(Err(CopyFailure::Engine { source: foreign.into() }));
            }
        };
        if !has_order(job.options()) {
            return self.begin(NewTransfer { transfer, job, route: Ok(route), ordered: false });
        }
        // Submitted on this thread, because the order covers the device work that is submitted by
        // now.
        match self.order(&route, &job, transfer) {
            Ok(order) => {
                let engine = Arc::clone(self.shared.engine(&route, RelayStep::Order));
                self.begin(NewTransfer { transfer, job, route: Ok(route), ordered: true });
                hop::submit(&engine, order);
            }
            Err(failure) => {
                self.begin(NewTransfer { transfer, job, route: Err(failure), ordered: false });
            }
        }
    }

    fn capture_order(&self, order: &DeviceOrder) -> Result<DeviceOrder, BoxedCause> {
        let [one, other] = &self.shared.engines;
        one.capture_order(order).or_else(|_| other.capture_order(order))
    }
}

impl Drop for RelayEngine {
    fn drop(&mut self) {
        if !self.owner.is_current() {
            let (shared, messages) = (Arc::clone(&self.shared), self.messages.clone());
            return threads::leave((shared, messages, self.thread.take()));
        }
        let _ = self.messages.send(Message::Close);
        threads::join(self.thread.take());
    }
}

terrane_core::debug_fields!(RelayEngine, |engine| {
    engines: engine.shared.engines.each_ref().map(|engine| engine.name()),
    slots: engine.slots()
});
