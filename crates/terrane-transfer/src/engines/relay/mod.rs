//! Copies by two other engines, by way of memory that both of them reach.

mod active;
mod bounce;
mod cut;
mod lanes;
mod route;
mod slot;
mod step;
mod worker;

pub use bounce::RelaySlots;
pub use step::{RelayStep, StepFailed};

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Sender, unbounded};
use terrane_core::{Allocate, BoxedCause, ByteCount, OwnerProcess};

use crate::engines::threads;
use crate::{
    CopyEngine, CopyJob, Declined, DeviceOrder, PinnedOrder, Planner, Quote, Terms, TransferError,
    TransferPlan,
};
use bounce::Bounce;
use route::{Route, Shared, has_order};
use step::{Failure, Part};
use worker::{Begin, Message, Worker};

const NAME: &str = "relay";

/// Copies between two kinds of storage that no engine copies between, by way of memory of a third
/// kind: from a device to a file through pinned memory, say, or from pageable memory to a device.
///
/// A transfer is cut into chunks. One of the two engines copies each into a bounce slot, and the
/// other one out of it: while some chunks are on their second hop, the next ones are on their
/// first. An engine has a few at a time, as it would end more of them all at once. The engines are
/// asked which of them takes which hop, so that one relay serves both directions.
///
/// # Slots
///
/// All transfers share the slots. One is allocated with the engine, as quotes are made over it;
/// the others when they are first wanted, on the relay's thread; [`trim`](Self::trim) frees those
/// that are idle. A chunk takes one slot and nothing else, so that slots always come back, and
/// transfers take turns at them, a chunk each. Where the allocator refuses further slots, transfers
/// go on with those that there are ([`slots`](Self::slots) tells).
///
/// # Terms
///
/// A device order is waited for once, as of the submission, before the first chunk begins; no slot
/// is held meanwhile. Files are made durable once, after the last chunk. The deadline is that of
/// every part, and of a transfer that waits for its turn. Counted as copied are bytes that have
/// arrived at the destination. A failure of either hop ends the transfer, when all that is in
/// flight of it has ended, with the error that names the blocks, caused by [`StepFailed`].
///
/// # Copies that cannot be stopped
///
/// An engine may [give up](CopyJob::give_up) a part that nobody answers. The transfer then ends
/// with that failure, its blocks stay claimed until the engine knows that the copy has ended, and
/// the slot that the part goes through is no longer one of the relay's ([`RelaySlots::given_up`]).
/// Another one is allocated when it is wanted; if there is none left and that is refused, transfers
/// fail. Until the part is given up it keeps its slot, and its place among the few chunks that its
/// engine has at a time: with no deadline of the transfer's or the engine's own, a peer that hangs
/// holds up the others.
///
/// # Threads
///
/// One thread, named `terrane-relay`, makes the plans of the parts and hands them to the engines;
/// no bytes pass through it. It ends the transfers as well, so what drops with one must not wait
/// for another ([`TransferManager::submit`](crate::TransferManager::submit)). Dropping the engine
/// lets the thread finish what was submitted, and joins it, unless it drops on a thread of an
/// engine, which must not wait for others: then it ends by itself.
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
/// // In earnest: an engine between a device and pinned memory, and an allocator of the latter.
/// let device = host.clone();
/// let bounce = SystemAllocator::new(SystemOptions::default());
/// let options = RelayOptions::default();
/// let to_disk = RelayEngine::new(device.clone(), disk.clone(), bounce.clone(), &options)?;
/// let to_system = RelayEngine::new(device.clone(), host.clone(), bounce, &options)?;
/// // What one engine does by itself it does faster, and gets.
/// let manager =
///     TransferManager::new([host as _, disk as _, Arc::new(to_disk) as _, Arc::new(to_system) as _]);
/// # drop(manager);
/// # Ok(())
/// # }
/// ```
pub struct RelayEngine {
    shared: Arc<Shared>,
    messages: Sender<Message>,
    next: AtomicU64,
    thread: Option<JoinHandle<()>>,
    owner: OwnerProcess,
}

/// The options of a [`RelayEngine`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RelayOptions {
    /// The bytes of a slot. It has to hold one layer of a block at least, and should hold a block.
    pub slot_bytes: ByteCount,
    /// How many slots there may be; there is always one. With less than two, hops take turns.
    pub slots: usize,
}

impl Default for RelayOptions {
    /// 8 slots of 16 MiB: several requests of a disk each, several of which are in flight.
    fn default() -> Self {
        Self { slot_bytes: ByteCount::mib(16), slots: 8 }
    }
}

impl RelayEngine {
    /// An engine that copies by these two, by way of memory from `bounce`. Which of the two is
    /// named first means nothing.
    ///
    /// # Errors
    ///
    /// [`TransferError::EngineNotStarted`] if the first slot cannot be had, or the thread cannot be
    /// started.
    pub fn new(
        first: Arc<dyn CopyEngine>,
        second: Arc<dyn CopyEngine>,
        bounce: impl Allocate + Send + Sync + 'static,
        options: &RelayOptions,
    ) -> Result<Self, TransferError> {
        let bounce = Bounce::new(bounce, options).map_err(|source| {
            TransferError::EngineNotStarted { engine: NAME, source: Box::new(source) }
        })?;
        let shared = Arc::new(Shared { engines: [first, second], bounce, planner: Planner::new() });
        let (messages, inbox) = unbounded();
        let worker = Worker::new(Arc::clone(&shared), inbox, messages.clone());
        let thread = threads::spawn("terrane-relay".to_owned(), move || worker.serve()).map_err(
            |source| TransferError::EngineNotStarted { engine: NAME, source: Box::new(source) },
        )?;
        let (next, owner) = (AtomicU64::new(0), OwnerProcess::current());
        Ok(Self { shared, messages, next, thread: Some(thread), owner })
    }

    /// How many slots there are, and may be. In a process that was forked from the engine's there
    /// are none.
    #[must_use]
    pub fn slots(&self) -> RelaySlots {
        if self.owner.is_current() { self.shared.bounce.slots() } else { RelaySlots::default() }
    }

    /// Frees the slots that no chunk is in, but for one, and says how much memory that was. They
    /// are allocated again when they are wanted.
    ///
    /// A process that was forked from the engine's frees nothing.
    pub fn trim(&self) -> ByteCount {
        if self.owner.is_current() { self.shared.bounce.trim() } else { ByteCount::ZERO }
    }

    fn begin(&self, begin: Begin) {
        // Should the thread be gone, the job drops here, which tells its caller.
        let _ = self.messages.send(Message::Begin(Box::new(begin)));
    }

    /// The part that waits for the device order of a job.
    fn order(&self, route: &Route, job: &CopyJob, transfer: u64) -> Result<CopyJob, Failure> {
        let part = Part { transfer, step: RelayStep::Order, chunk: 0 };
        let engine = route.engine(part.step);
        let plan = self.shared.order_plan(route, job.plan())?;
        let (device_order, deadline) = (job.terms().device_order, job.terms().deadline);
        let terms = Terms { device_order, deadline, ..Terms::default() };
        step::job(engine, job.claims(), plan, terms, Arc::default(), part, &self.messages)
    }
}

// SAFETY: the engine touches no byte itself. The parts that it hands to others copy between the
// blocks of the job's plan and slots, each of which belongs to one part at a time; it finishes the
// job when every part has ended, and a part that is lost tells of its end as it drops. What a part
// that was given up may still touch, the blocks and the slot, belongs to its remains: those hold
// the claims of the job as well, and the slot is never used again.
unsafe impl CopyEngine for RelayEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined> {
        if !self.owner.is_current() {
            return Err(Declined::Forked);
        }
        Ok(self.shared.route(plan, terms)?.quote(&self.shared.bounce))
    }

    fn submit(&self, job: CopyJob) {
        // Relaxed: only uniqueness is asked for.
        let transfer = self.next.fetch_add(1, Ordering::Relaxed);
        if !has_order(job.terms()) {
            return self.begin(Begin { transfer, job, route: None, ordered: false });
        }
        // Here and now, as what the device has been given by now is the order.
        let routed = self.shared.route_job(&job).and_then(|route| {
            let order = self.order(&route, &job, transfer)?;
            Ok((route, order))
        });
        match routed {
            Ok((route, order)) => {
                let engine = Arc::clone(route.engine(RelayStep::Order));
                self.begin(Begin { transfer, job, route: Some(Ok(route)), ordered: true });
                step::submit(&engine, order);
            }
            Err(failure) => {
                self.begin(Begin { transfer, job, route: Some(Err(failure)), ordered: false });
            }
        }
    }

    fn pin(&self, order: DeviceOrder) -> Result<PinnedOrder, BoxedCause> {
        let [one, other] = &self.shared.engines;
        one.pin(order).or_else(|_| other.pin(order))
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

impl fmt::Debug for RelayEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayEngine")
            .field("engines", &self.shared.engines.each_ref().map(|engine| engine.name()))
            .field("slots", &self.slots())
            .finish_non_exhaustive()
    }
}
