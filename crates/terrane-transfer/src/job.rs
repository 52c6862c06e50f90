//! The engine's end of a transfer.

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
    DeviceOrder, Durability, EngineTimes, Explanation, LayerSignals, PinnedOrder, Report, Ticket,
    TransferError, TransferId, TransferPlan,
};

/// A validated transfer that an engine executes: the plan, and the duty to say how it ended.
///
/// It owns both ends of the transfer and the caller's guard, through however many threads of the
/// engine it goes. [`finish`](Self::finish) lets go of them; so does dropping it, which tells the
/// caller that the engine stopped.
pub struct CopyJob {
    // Fields drop in this order, so that when the outcome is published the memory at both ends
    // is no longer held and the blocks are free for others.
    plan: TransferPlan,
    /// Shared with the parts of the job.
    claims: Arc<Claims>,
    /// Whether it is a part of another job, to which the claims belong.
    is_part: bool,
    terms: Terms,
    /// Keeps the order of the terms.
    order: Option<PinnedOrder>,
    progress: Arc<Progress>,
    ending: Ending,
}

/// The claims of a transfer on the blocks of its two ends.
pub(crate) struct Claims {
    pub(crate) reading: Claim,
    pub(crate) writing: Claim,
}

/// What a transfer asks for besides the copy itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Terms {
    /// What the copy has to run after on the device's side.
    pub device_order: Option<DeviceOrder>,
    /// What has to be true of written files before the job is finished, besides what each file
    /// [states](terrane_core::FileHandle::durability) itself.
    pub durability: Durability,
    /// When the job has to be finished, done or not.
    pub deadline: Option<Instant>,
    /// Whether further jobs write the same files for the same transfer, so that it is too early to
    /// make them durable. The last of them, which may have no runs, says otherwise.
    pub more_follows: bool,
    /// Whether the job is to say what becomes of each layer. The plan is ordered by layer then.
    pub layer_wise: bool,
    /// What the peer at the other end is told once all bytes have arrived, and no sooner. Only an
    /// engine that talks to peers is asked for it.
    pub notification: Option<Arc<[u8]>>,
}

impl CopyJob {
    pub(crate) fn new(
        plan: TransferPlan,
        claims: Claims,
        terms: Terms,
        order: Option<PinnedOrder>,
        progress: Arc<Progress>,
        ending: Ending,
    ) -> Self {
        Self { plan, claims: Arc::new(claims), is_part: false, terms, order, progress, ending }
    }

    /// A part of another job, whose claims on what is the transfer's both of them hold. What else the
    /// plan touches is its maker's alone, who is told if the part is given up.
    pub(crate) fn part(
        claims: &Arc<Claims>,
        plan: TransferPlan,
        terms: Terms,
        progress: Arc<Progress>,
        ending: Ending,
    ) -> Self {
        let claims = Arc::clone(claims);
        Self { plan, claims, is_part: true, terms, order: None, progress, ending }
    }

    /// For the parts of this job.
    pub(crate) fn claims(&self) -> &Arc<Claims> {
        &self.claims
    }

    /// What to copy.
    #[must_use]
    pub fn plan(&self) -> &TransferPlan {
        &self.plan
    }

    /// The path that the engine quoted.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.ending.explanation.path
    }

    /// How long the engine said that the copy would take.
    #[must_use]
    pub fn predicted(&self) -> Duration {
        self.ending.explanation.predicted
    }

    /// What the transfer asks for besides the copy itself.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Where to count the bytes that have been copied.
    #[must_use]
    pub fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Where to say what becomes of each layer; `Some` if the transfer is layer-wise.
    #[must_use]
    pub fn layers(&self) -> Option<&LayerSignals> {
        self.ending.layers.as_ref()
    }

    /// Has threads that wait for the transfer, or for a layer of it, help by way of `attendant`
    /// until the job has ended. Those that sleep already begin to. A second attendant takes the
    /// place of the first one; whom it has invited again, or the first one has, attends anew.
    ///
    /// The engine keeps the attendant alive for as long as it is of use: the job does not, so that
    /// the attendant may own the job.
    pub fn attend(&self, attendant: Arc<dyn Attend>) {
        if let Some(layers) = &self.ending.layers {
            layers.attend(&attendant);
        }
        if let Some(settle) = &self.ending.settle {
            settle.attend(&attendant);
        }
    }

    /// Says that the copy begins now, as opposed to waiting in a queue. Later calls change
    /// nothing.
    pub fn start(&self) {
        self.ending.started.get_or_init(Instant::now);
    }

    /// How long ago the copy began.
    #[must_use]
    pub fn running_for(&self) -> Duration {
        self.ending.started.get().map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Says what the engine's own measurement of the copy was, for the report. Of several calls the
    /// last one counts.
    pub fn measured(&mut self, times: EngineTimes) {
        self.ending.engine_times = Some(times);
    }

    /// Says that the copy has failed although it may go on: what is asked to copy does not answer,
    /// and cannot be stopped. The caller has its outcome and its guard back, and what runs after the
    /// transfer fails; the memory at both ends and the claims on its blocks belong to the [`Remains`]
    /// from here on.
    ///
    /// A part of another engine's transfer, as a relay's chunk is, is given up likewise: the transfer
    /// ends with the failure and its blocks stay claimed, and that engine leaves alone what memory of
    /// its own the part goes through.
    pub fn give_up(mut self, failure: CopyFailure) -> Remains {
        self.ending.result = Some(Err(self.describe(failure)));
        self.leave_claims();
        self.leaves_remains();
        let Self { plan, claims, is_part: _, terms: _, order, progress: _, ending } = self;
        shielded(|| drop((order, ending)));
        Remains { plan, _claims: claims }
    }

    /// Says, before the end, that something may go on to touch the memory when the job has ended: it
    /// is given up, or a part of it has been.
    pub(crate) fn leaves_remains(&self) {
        if let Some(settle) = &self.ending.settle {
            settle.leaves_remains();
        }
    }

    /// Says how the copy ended, and lets go of everything.
    ///
    /// That runs foreign code: the drop of the caller's guard and of adopted memory, and wakers.
    /// Should it panic, the panic ends here, as the engine has other jobs to serve. It
    /// [must not wait](crate::TransferManager::submit) for another transfer, so that an engine may
    /// finish its jobs on a single thread.
    pub fn finish(mut self, result: Result<(), CopyFailure>) {
        let result = result.map_err(|failure| self.describe(failure));
        match &result {
            Ok(()) if self.is_part => {}
            Ok(()) => self.claims.writing.has_written(Written::All),
            Err(_) => self.leave_shared_claims(),
        }
        self.ending.result = Some(result);
        shielded(|| drop(self));
    }

    /// Ends the job with this very error: it was never handed to an engine, or its engine has it
    /// from another.
    pub(crate) fn abandon(mut self, cause: TransferError) {
        if cause.is_refusal() {
            self.claims.writing.has_written(Written::Nothing);
        } else {
            self.leave_shared_claims();
        }
        self.ending.result = Some(Err(cause));
        shielded(|| drop(self));
    }

    /// Looks whether the job may start, once all that it runs after has ended.
    pub(crate) fn check_start(&self, allow_incomplete: bool) -> Result<(), TransferError> {
        self.claims.reading.check_start(allow_incomplete)?;
        self.claims.writing.check_start(allow_incomplete)
    }

    /// The transfer fails. If a part of it was given up, that part keeps the claims, and goes on to
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

/// What a transfer that was [given up](CopyJob::give_up) leaves behind: the memory at both ends, and
/// the claims on its blocks.
///
/// Transfers that want the blocks are refused until it drops, and so is
/// [`Endpoint::hold_for_write`](crate::Endpoint::hold_for_write). The engine drops it when it knows
/// that the copy has ended, and never (`ManuallyDrop`) if it cannot know.
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
        /// How many of its bytes, from its beginning on, are not concerned: those of the blocks
        /// before the one that errors then name. Zero where the engine does not know.
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
}

/// How far a transfer has come.
#[derive(Debug, Default)]
pub struct Progress {
    copied: AtomicU64,
}

impl Progress {
    /// The bytes copied so far. Engines add to it in steps of their own size.
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

/// What is left to do when a job has let go of the memory: to publish the outcome and to start
/// whatever runs after it. Dropping it does so.
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
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // A forked process that drops what its parent kept: who waits there has an error already, and
        // nothing that waits for this transfer is started.
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
        // The ticket first: whoever has the outcome finds the ticket ended.
        let dependents = self.ticket.end(succeeded);
        // Then the layers, likewise.
        if let Some(layers) = self.layers.take() {
            shielded(|| layers.end(succeeded));
            shielded(|| drop(layers));
        }
        let settle = self.settle.take();
        if let Some(settle) = &settle {
            shielded(|| settle.settle(result));
        }
        // With the outcome, if nobody is interested in it any more, goes the caller's guard: what
        // it guards is the caller's again before anything that runs after this transfer starts.
        shielded(|| drop(settle));
        tell(dependents, self.ticket.id(), succeeded);
    }
}

/// Runs what may run foreign code. One transfer's guard or waker that panics must not keep
/// others from being told of an end, nor stop the engine that serves them.
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

/// Tells `dependents` of an end, in their order.
///
/// Telling one of them may end it in turn (its predecessor failed) and so come here again. Such a
/// chain can be as long as its users make it, so it goes through a list and not through the
/// stack.
pub(crate) fn tell(dependents: Vec<Arc<dyn Dependent>>, ended: TransferId, succeeded: bool) {
    let mut notices = dependents.into_iter().map(|dependent| (dependent, ended, succeeded));
    if NOTICES.try_with(|list| list.borrow_mut().extend(&mut notices)).is_err() {
        // The thread is about to end, and its list has gone: the stack has to do.
        return notices.for_each(deliver);
    }
    if TELLING.with(|telling| telling.replace(true)) {
        return;
    }
    tell_rest();
    TELLING.with(|telling| telling.set(false));
}

/// Tells whoever is still on this thread's list.
///
/// Before the thread sleeps for another transfer, as the drop of a guard may have it do while a
/// dependent is told of an end: what is waited for may be further down the list.
pub(crate) fn tell_rest() {
    // Where the thread is about to end, its list has gone.
    while let Ok(Some(notice)) = NOTICES.try_with(|list| list.borrow_mut().pop_front()) {
        deliver(notice);
    }
}

fn deliver((dependent, ended, succeeded): Notice) {
    shielded(|| dependent.predecessor_ended(ended, succeeded));
}
