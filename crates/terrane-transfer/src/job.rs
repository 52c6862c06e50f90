//! The engine's end of a transfer.

mod cancelling;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use terrane_core::{BoxedCause, ByteCount};

use crate::attend::Attend;
use crate::completion::Settle;
use crate::hazard::{Claim, Written};
use crate::sync::per_thread;
use crate::ticket::Dependent;
use crate::{
    Decision, DeviceOrder, Durability, EngineTimes, Explanation, ForeignDecision, LayerSignals,
    Report, Ticket, TransferError, TransferId, TransferPlan,
};

/// A validated transfer that an engine executes: the plan, and the duty to report how it ended.
///
/// It owns both ends of the transfer and the caller's guard, on whichever thread of the engine it
/// is. [`finish`](Self::finish) releases them. Dropping it releases them too, and reports to the
/// caller that the engine stopped.
pub struct CopyJob {
    // Fields drop in this order. When the outcome is published, the memory at both ends is
    // therefore no longer held, and the blocks are free for other transfers.
    plan: TransferPlan,
    /// Shared with the parts of the job.
    claims: Arc<Claims>,
    /// Whether it is a part of another job, which owns the claims.
    is_part: bool,
    terms: Terms,
    progress: Arc<Progress>,
    ending: Ending,
}

/// The claims of a transfer on the blocks of its two ends. The transfer and all its parts share
/// them.
pub(crate) struct Claims {
    pub(crate) reading: Claim,
    pub(crate) writing: Claim,
    /// Says whether the transfer was cancelled.
    pub(crate) ticket: Ticket,
}

/// Options of a transfer beyond the copy itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terms {
    /// The device work that the copy has to run after.
    pub device_order: Option<DeviceOrder>,
    /// Minimum durability of written files when the job is finished. A file's [own
    /// setting](terrane_core::FileHandle::durability) applies if it is stricter.
    pub durability: Durability,
    /// The time by which the job has to be finished, done or not.
    pub deadline: Option<Instant>,
    /// Whether further jobs write the same files for the same transfer, so that it is too early to
    /// make them durable. It is `false` for the last of them, which may have no runs.
    pub more_follows: bool,
    /// Whether the job reports each layer. The plan is then ordered by layer.
    pub layer_wise: bool,
    /// The notification for the peer at the other end, sent once all bytes have arrived, and no
    /// sooner. Only an engine that serves peers receives it.
    pub notification: Option<Arc<[u8]>>,
}

impl CopyJob {
    pub(crate) fn new(
        plan: TransferPlan,
        claims: Claims,
        terms: Terms,
        progress: Arc<Progress>,
        ending: Ending,
    ) -> Self {
        Self { plan, claims: Arc::new(claims), is_part: false, terms, progress, ending }
    }

    /// A part of another job. Both hold the claims on the transfer's blocks. All other memory of
    /// the plan belongs to the caller alone, which is notified if the part is given up.
    pub(crate) fn part(
        claims: &Arc<Claims>,
        plan: TransferPlan,
        terms: Terms,
        progress: Arc<Progress>,
        ending: Ending,
    ) -> Self {
        let claims = Arc::clone(claims);
        Self { plan, claims, is_part: true, terms, progress, ending }
    }

    /// The claims, which parts of this job share.
    pub(crate) fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// The plan to copy.
    #[must_use]
    pub fn plan(&self) -> &TransferPlan {
        &self.plan
    }

    /// The decision of the engine's [quote](crate::CopyEngine::quote).
    ///
    /// # Errors
    ///
    /// [`ForeignDecision`] if it has another type, as another engine made the quote.
    pub fn decision<T: Decision>(&self) -> Result<&T, ForeignDecision> {
        self.ending.explanation.decision.downcast()
    }

    /// How long the engine predicted that the copy would take.
    #[must_use]
    pub fn predicted(&self) -> Duration {
        self.ending.explanation.predicted
    }

    /// The transfer's options beyond the copy itself.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Counts the bytes that have been copied.
    #[must_use]
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Reports the state of each layer; `Some` if the transfer is layer-wise.
    #[must_use]
    pub fn layers(&self) -> Option<&LayerSignals> {
        self.ending.layers.as_ref()
    }

    /// Lets threads that wait for the transfer, or for a layer of it, poll `attendant` until the
    /// job has ended. Threads that already sleep wake and poll too. A second attendant replaces the
    /// first one. A second invitation, also of the same attendant, restarts each thread's attention
    /// time.
    ///
    /// The engine keeps the attendant alive while it is useful. The job does not, so that the
    /// attendant may own the job.
    pub fn attend(&self, attendant: Arc<dyn Attend>) {
        if let Some(layers) = &self.ending.layers {
            layers.attend(&attendant);
        }
        if let Some(settle) = &self.ending.settle {
            settle.attend(&attendant);
        }
    }

    /// Marks the start of the copy, after any time in a queue. Later calls change nothing.
    ///
    /// An engine calls it before it copies the first byte. If a job is cancelled before that, its
    /// destination counts as unchanged.
    pub fn start(&self) {
        self.ending.started.get_or_init(Instant::now);
    }

    /// How long ago the copy began.
    #[must_use]
    pub fn running_for(&self) -> Duration {
        self.ending.started.get().map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Sets the engine's own measurement of the copy, for the report. The last call counts.
    pub fn measured(&mut self, times: EngineTimes) {
        self.ending.engine_times = Some(times);
    }

    /// Fails the job although its copy may continue: the device or peer does not answer, and the
    /// copy cannot be stopped. The caller receives its outcome and its guard, and transfers that
    /// run after this one fail. From here on the [`Remains`] own the memory at both ends and the
    /// claims on its blocks.
    ///
    /// A part of another engine's transfer, such as a relay's chunk, is given up in the same way.
    /// The transfer ends with the failure, and its blocks stay claimed. The other engine does not
    /// reuse its own memory that the part goes through.
    pub fn give_up(mut self, failure: CopyFailure) -> Remains {
        self.ending.result = Some(Err(self.describe(failure)));
        self.leave_claims();
        self.leaves_remains();
        let Self { plan, claims, is_part: _, terms, progress: _, ending } = self;
        shielded(|| drop((terms, ending)));
        Remains { plan, _claims: claims }
    }

    /// Reports, before the end, that something may touch the memory after the job has ended: the
    /// job or a part of it was given up.
    pub(crate) fn leaves_remains(&self) {
        if let Some(settle) = &self.ending.settle {
            settle.leaves_remains();
        }
    }

    /// Reports how the copy ended, and releases everything.
    ///
    /// This runs foreign code: wakers, and the drop of the caller's guard and of adopted memory. A
    /// panic there is caught here, as the engine has other jobs to serve. The foreign code [must
    /// not wait](crate::TransferManager::submit) for another transfer, so that an engine may finish
    /// its jobs on a single thread.
    pub fn finish(mut self, result: Result<(), CopyFailure>) {
        let result = result.map_err(|failure| self.describe(failure));
        match &result {
            Ok(()) if self.is_part => {}
            Ok(()) => self.claims.writing.has_written(Written::All),
            Err(cause) => self.release_after(cause),
        }
        self.ending.result = Some(result);
        shielded(|| drop(self));
    }

    /// Ends the job with this error, as it is: the job never reached an engine, or its engine got
    /// the error from another.
    pub(crate) fn abandon(mut self, cause: TransferError) {
        self.release_after(&cause);
        self.ending.result = Some(Err(cause));
        shielded(|| drop(self));
    }

    /// Checks whether the job may start, once all its predecessors have ended.
    pub(crate) fn check_start(&self, allow_incomplete: bool) -> Result<(), TransferError> {
        self.claims.reading.check_start(allow_incomplete)?;
        self.claims.writing.check_start(allow_incomplete)
    }

    /// The transfer fails with this error.
    fn release_after(&self, cause: &TransferError) {
        if !cause.is_refusal() {
            self.leave_shared_claims();
        } else if !self.is_part {
            self.claims.writing.has_written(Written::Nothing);
        }
    }

    /// The transfer fails. If a part of it was given up, that part keeps the claims, and may still
    /// touch the blocks.
    fn leave_shared_claims(&self) {
        if Arc::strong_count(&self.claims) > 1 {
            self.leave_claims();
        }
    }

    /// The transfer fails, and its claims remain.
    fn leave_claims(&self) {
        if !self.is_part {
            self.claims.reading.leave();
            self.claims.writing.leave();
        }
    }

    fn describe(&self, failure: CopyFailure) -> TransferError {
        match failure {
            CopyFailure::Run { index, offset, source } => {
                match self.plan.run(index).zip(self.plan.blocks_of(index, offset)) {
                    Some((run, [source_block, destination_block])) => TransferError::Copy {
                        source_block,
                        destination_block,
                        bytes: run.bytes(),
                        source,
                    },
                    None => {
                        TransferError::Engine { engine: self.ending.explanation.engine, source }
                    }
                }
            }
            CopyFailure::Engine { source } => {
                TransferError::Engine { engine: self.ending.explanation.engine, source }
            }
            CopyFailure::DeadlineExceeded => TransferError::DeadlineExceeded {
                after: self.ending.submitted.elapsed(),
                done: self.progress.copied(),
                total: self.plan.bytes(),
            },
            CopyFailure::Cancelled => self.cancelled(),
        }
    }
}

impl fmt::Debug for CopyJob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyJob")
            .field("transfer", &self.ending.ticket.id())
            .field("explanation", &self.ending.explanation)
            .finish_non_exhaustive()
    }
}

/// The resources of a transfer that was [given up](CopyJob::give_up): the memory at both ends, and
/// the claims on its blocks.
///
/// Transfers of the blocks are refused until it drops, and so is
/// [`Endpoint::hold_for_write`](crate::Endpoint::hold_for_write). The engine drops it when it knows
/// that the copy has ended. If it cannot know, it never drops it (`ManuallyDrop`).
#[must_use = "dropping it says that nothing touches the memory any more"]
pub struct Remains {
    // Fields drop in this order, as in `CopyJob`.
    plan: TransferPlan,
    _claims: Arc<Claims>,
}

impl fmt::Debug for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Remains").field(&self.plan).finish()
    }
}

/// How an engine failed to execute a job.
#[derive(Debug)]
#[non_exhaustive]
pub enum CopyFailure {
    /// One run could not be copied.
    Run {
        /// Its index in the plan's runs.
        index: usize,
        /// The number of its bytes, from its start, that belong to blocks before the failed one.
        /// Errors name the block at this offset. Zero if the engine does not know.
        offset: ByteCount,
        /// Why.
        source: BoxedCause,
    },
    /// The engine failed as a whole.
    Engine {
        /// Why.
        source: BoxedCause,
    },
    /// The job's deadline passed.
    DeadlineExceeded,
    /// The job was [cancelled](CopyJob::is_cancelled).
    Cancelled,
}

/// The progress of a transfer.
#[derive(Debug, Default)]
pub struct Progress {
    copied: AtomicU64,
}

impl Progress {
    /// The bytes copied so far. Each engine adds to it in steps of its own size.
    #[must_use]
    pub fn copied(&self) -> ByteCount {
        // Relaxed: a figure to show, which orders nothing.
        ByteCount::new(self.copied.load(Ordering::Relaxed))
    }

    /// Counts bytes as copied.
    pub fn add(&self, bytes: ByteCount) {
        self.copied.fetch_add(bytes.get(), Ordering::Relaxed);
    }
}

/// The last part of a job, after the memory is released. Its drop publishes the outcome and starts
/// the transfers that run after this one.
pub(crate) struct Ending {
    ticket: Ticket,
    /// `None` while it drops.
    settle: Option<Arc<dyn Settle>>,
    layers: Option<LayerSignals>,
    explanation: Explanation,
    submitted: Instant,
    started: OnceLock<Instant>,
    engine_times: Option<EngineTimes>,
    result: Option<Result<(), TransferError>>,
    /// Whether the ticket ends later, by other means.
    leaves_ticket: bool,
}

impl Ending {
    pub(crate) fn new(
        ticket: Ticket,
        settle: Arc<dyn Settle>,
        layers: Option<LayerSignals>,
        explanation: Explanation,
    ) -> Self {
        Self {
            ticket,
            settle: Some(settle),
            layers,
            explanation,
            submitted: Instant::now(),
            started: OnceLock::new(),
            engine_times: None,
            result: None,
            leaves_ticket: false,
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // A forked process drops its parent's job. Waits there already return an error, and nothing
        // that waits for this transfer is started.
        if !self.ticket.is_of_this_process() {
            return;
        }
        let result = self.result.take().unwrap_or(Err(TransferError::EngineStopped)).map(|()| {
            let started = self.started.get().copied().unwrap_or(self.submitted);
            Report {
                explanation: self.explanation.clone(),
                queued: started.saturating_duration_since(self.submitted),
                copied: started.elapsed().max(Duration::from_nanos(1)),
                engine_times: self.engine_times,
            }
        });
        let succeeded = result.is_ok();
        // The ticket ends first: a thread that has the outcome finds the ticket ended.
        let dependents = if self.leaves_ticket { Vec::new() } else { self.ticket.end(succeeded) };
        // The layers end next, for the same reason.
        if let Some(layers) = self.layers.take() {
            shielded(|| layers.end(succeeded));
            shielded(|| drop(layers));
        }
        let settle = self.settle.take();
        if let Some(settle) = &settle {
            shielded(|| settle.settle(result));
        }
        // If the completion was dropped, this drops the outcome and the caller's guard. It happens
        // before any transfer that runs after this one starts.
        shielded(|| drop(settle));
        tell(dependents, self.ticket.id(), succeeded);
    }
}

/// Runs code that may call foreign code, and catches its panics. A guard or waker that panics must
/// not stop the engine or keep others from being notified.
pub(crate) fn shielded(run: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(run)).is_err() {
        tracing::error!("foreign code, such as a guard or a waker, panicked as a transfer ended");
    }
}

type Notice = (Arc<dyn Dependent>, TransferId, bool);

per_thread! {
    static NOTICES: RefCell<VecDeque<Notice>> = const { RefCell::new(VecDeque::new()) };
    static TELLING: Cell<bool> = const { Cell::new(false) };
}

/// Notifies `dependents` of an end, in their order.
///
/// A notification may end a dependent in turn (its predecessor failed) and so come here again.
/// Users can build chains of any length, so a list is used instead of recursion.
pub(crate) fn tell(dependents: Vec<Arc<dyn Dependent>>, ended: TransferId, succeeded: bool) {
    let mut notices = dependents.into_iter().map(|dependent| (dependent, ended, succeeded));
    if NOTICES.try_with(|list| list.borrow_mut().extend(&mut notices)).is_err() {
        // The thread is exiting and its list no longer exists, so this recurses.
        return notices.for_each(deliver);
    }
    if TELLING.with(|telling| telling.replace(true)) {
        return;
    }
    tell_rest();
    TELLING.with(|telling| telling.set(false));
}

/// Delivers the notifications that are still on this thread's list.
///
/// Called before the thread sleeps for another transfer, which a guard's drop may do while a
/// dependent is notified. That transfer may be further down the list.
pub(crate) fn tell_rest() {
    // If the thread is exiting, its list no longer exists.
    while let Ok(Some(notice)) = NOTICES.try_with(|list| list.borrow_mut().pop_front()) {
        deliver(notice);
    }
}

fn deliver((dependent, ended, succeeded): Notice) {
    shielded(|| dependent.predecessor_ended(ended, succeeded));
}
