//! The engine's end of a transfer.

mod cancelling;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use terrane_core::{BoxedCause, ByteCount};

use super::finalizer::{Finalizer, OutcomeSink, Waiters};
use super::quote::{Decision, ForeignDecision};
use crate::checksums::block_sums::BlockSums;
use crate::completion::layers::LayerSignals;
use crate::completion::progress::CopyProgress;
use crate::completion::waiter_progress::WaiterProgress;
use crate::error::TransferError;
use crate::explain::{EngineTimes, Explanation};
use crate::hazard::notify::catch_foreign_panic;
use crate::hazard::table::{Claim, Written};
use crate::hazard::ticket::Ticket;
use crate::metrics::PathMetrics;
use crate::plan::TransferPlan;
use crate::transfer::TransferOptions;

/// A validated transfer that an engine executes. The engine must report how it ended.
///
/// The job owns both ends of the transfer and the caller's guard, on any thread of the engine.
/// [`finish`](Self::finish) releases them. Dropping the job releases them too, and reports to the
/// caller that the engine stopped.
pub struct CopyJob {
    /// Boxed, because a job is moved several times.
    parts: Box<JobParts>,
}

struct JobParts {
    // Fields drop in this order. So when the outcome is published, the job no longer owns the
    // memory at both ends, and the blocks are free for other transfers.
    plan: TransferPlan,
    /// Shared with the parts of the job.
    claims: Arc<TransferClaims>,
    /// Whether it is a part of another job, which owns the claims.
    is_part: bool,
    options: TransferOptions,
    /// The checksums that the engine computes.
    sums: Option<Arc<BlockSums>>,
    progress: Arc<CopyProgress>,
    finalizer: Finalizer,
}

/// The claims of a transfer on the blocks of its two ends. The transfer and all its parts share
/// them.
pub(crate) struct TransferClaims {
    pub(crate) reading: Claim,
    pub(crate) writing: Claim,
    /// Its ticket records a cancellation.
    pub(crate) ticket: Ticket,
}

impl CopyJob {
    /// Creates a job that ends `ticket`. `counted` has the counters of its path, if it is counted.
    pub(crate) fn new(
        plan: TransferPlan,
        claims: Arc<TransferClaims>,
        options: TransferOptions,
        progress: Arc<CopyProgress>,
        ticket: Ticket,
        explanation: Explanation,
        counted: Option<Arc<PathMetrics>>,
    ) -> Self {
        // Written in place, in one expression: each of these values would be copied several times.
        let parts = Box::write(
            Box::new_uninit(),
            JobParts {
                plan,
                claims,
                is_part: false,
                options,
                sums: None,
                progress,
                finalizer: Finalizer {
                    ticket,
                    sink: None,
                    layers: None,
                    explanation,
                    submitted: Instant::now(),
                    started: OnceLock::new(),
                    engine_times: None,
                    retries: 0,
                    counted,
                    checksums: None,
                    result: None,
                    leaves_ticket: false,
                },
            },
        );
        Self { parts }
    }

    /// Connects the job with the caller's end, just before it starts.
    pub(crate) fn connect(&mut self, sink: Arc<dyn OutcomeSink>, layers: Option<LayerSignals>) {
        let finalizer = &mut self.parts.finalizer;
        (finalizer.sink, finalizer.layers) = (Some(sink), layers);
    }

    /// Requests the checksums of the options from the engine. The caller `named` the destination
    /// blocks in this order.
    pub(crate) fn compute_checksums(&mut self, named: &[u32]) {
        let checksums = self.parts.options.checksums.clone();
        let sums = checksums.map(|wanted| BlockSums::new(wanted, named, &self.parts.plan));
        self.parts.sums = sums.map(Arc::new);
    }

    /// Creates a part of another job. Both own the claims on the transfer's blocks. All other
    /// memory of the plan belongs to the relay alone. The part's sink tells it about an orphan.
    pub(crate) fn part(
        claims: &Arc<TransferClaims>,
        plan: TransferPlan,
        options: TransferOptions,
        progress: Arc<CopyProgress>,
        explanation: Explanation,
    ) -> Self {
        let (claims, ticket) = (Arc::clone(claims), Ticket::new([]));
        let mut job = Self::new(plan, claims, options, progress, ticket, explanation, None);
        job.parts.is_part = true;
        job
    }

    /// The claims, which the parts of this job share.
    pub(crate) fn claims(&self) -> &Arc<TransferClaims> {
        &self.parts.claims
    }

    /// The plan to copy.
    #[must_use]
    pub fn plan(&self) -> &TransferPlan {
        &self.parts.plan
    }

    /// The decision of the engine's [quote](crate::CopyEngine::quote).
    ///
    /// # Errors
    ///
    /// [`ForeignDecision`] if it has another type, because another engine created the quote.
    pub fn decision<T: Decision>(&self) -> Result<&T, ForeignDecision> {
        self.parts.finalizer.explanation.decision.downcast()
    }

    /// The time that the engine predicted for the copy.
    #[must_use]
    pub fn predicted(&self) -> Duration {
        self.parts.finalizer.explanation.predicted
    }

    /// The transfer's options beyond the copy itself.
    #[must_use]
    pub fn options(&self) -> &TransferOptions {
        &self.parts.options
    }

    /// Sets the checksum of a pair of blocks, by its index in the [plan](Self::plan), if
    /// [checksums](TransferOptions::checksums) are requested.
    pub fn set_checksum(&self, pair: usize, sum: u64) {
        if let Some(sums) = &self.parts.sums {
            sums.set(pair, sum);
        }
    }

    /// The number of checksums that the engine computes: one for each pair of blocks, or none.
    #[must_use]
    pub fn checksums(&self) -> usize {
        self.parts.sums.as_ref().map_or(0, |sums| sums.len())
    }

    /// Counts the bytes that have been copied.
    #[must_use]
    pub fn progress(&self) -> &Arc<CopyProgress> {
        &self.parts.progress
    }

    /// Reports the state of each layer; `Some` if the transfer is layer-by-layer.
    #[must_use]
    pub fn layers(&self) -> Option<&LayerSignals> {
        self.parts.finalizer.layers.as_ref()
    }

    /// Lets threads that wait for the transfer, or for a layer of it, poll `progress` until the job
    /// has ended. Threads that already sleep wake and poll too. A second value replaces the first.
    /// A second invitation, also with the same value, restarts each thread's spin time.
    ///
    /// The engine keeps `progress` alive while it is useful. The job does not keep it alive, so
    /// `progress` may own the job.
    pub fn invite_waiters(&self, progress: Arc<dyn WaiterProgress>) {
        if let Some(layers) = &self.parts.finalizer.layers {
            layers.invite_waiters(&progress);
        }
        if let Some(sink) = &self.parts.finalizer.sink {
            sink.invite_waiters(&progress);
        }
    }

    /// The threads that wait for the transfer, for parts of this job that invite them.
    pub(crate) fn waiters(&self) -> Waiters {
        self.parts.finalizer.waiters()
    }

    /// Records the start of the copy, after any time in a queue, and returns its time. Later calls
    /// record nothing.
    ///
    /// An engine calls this before it copies the first byte. If a job is cancelled before that, or
    /// its deadline passes, its destination counts as unchanged.
    pub fn start(&self) -> Instant {
        *self.parts.finalizer.started.get_or_init(Instant::now)
    }

    /// The time since the copy began.
    #[must_use]
    pub fn running_for(&self) -> Duration {
        self.parts.finalizer.started.get().map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Sets the engine's own measurement of the copy, for the report. The last call counts.
    pub fn measured(&mut self, times: EngineTimes) {
        self.parts.finalizer.engine_times = Some(times);
    }

    /// Counts a part that was copied again, for [snapshots](crate::TransferSnapshot).
    pub fn retried(&mut self) {
        self.parts.finalizer.retries = self.parts.finalizer.retries.saturating_add(1);
    }

    /// Fails the job although its copy may continue: the device or peer does not answer, and the
    /// copy cannot be stopped. The caller receives the outcome and the guard. Transfers that run
    /// after this one fail. From here on, the [`Orphaned`] owns the memory at both ends and the
    /// claims on its blocks.
    ///
    /// A part of another engine's transfer, such as a relay's chunk, is orphaned in the same way.
    /// The transfer ends with the failure, and its blocks stay claimed. The other engine does not
    /// reuse the memory that the part copies through.
    pub fn orphan(mut self, failure: CopyFailure) -> Orphaned {
        self.parts.finalizer.result = Some(Err(self.describe(failure)));
        self.orphan_claims();
        self.report_orphaned();
        let JobParts { plan, claims, options, finalizer, .. } = *self.parts;
        catch_foreign_panic(|| drop((options, finalizer)));
        Orphaned { plan, _claims: claims }
    }

    /// Reports, before the end, that the job or a part of it was orphaned: its work may access the
    /// memory after the job has ended.
    pub(crate) fn report_orphaned(&self) {
        if let Some(sink) = &self.parts.finalizer.sink {
            sink.report_orphaned();
        }
    }

    /// Reports how the copy ended, and releases everything.
    ///
    /// This runs foreign code: wakers, and the drop of the caller's guard and of adopted memory. A
    /// panic there is caught here, because the engine has other jobs. The foreign code [must not
    /// wait](crate::TransferManager::submit) for another transfer, so that an engine may finish its
    /// jobs on a single thread.
    pub fn finish(mut self, result: Result<(), CopyFailure>) {
        let result = result.map_err(|failure| self.describe(failure));
        let result = result.and_then(|()| self.check_sums());
        match &result {
            Ok(()) if self.parts.is_part => {}
            Ok(()) => self.parts.claims.writing.has_written(Written::All),
            Err(cause) => self.release_after(cause),
        }
        self.parts.finalizer.result = Some(result);
        catch_foreign_panic(|| drop(self));
    }

    /// Verifies the checksums, and stores them for the report.
    fn check_sums(&mut self) -> Result<(), TransferError> {
        if let Some(sums) = self.parts.sums.take() {
            let engine = self.parts.finalizer.explanation.engine;
            self.parts.finalizer.checksums = Some(sums.end(&self.parts.plan, engine)?);
        }
        Ok(())
    }

    /// Ends the job with this error, without a description: the job never reached an engine, or its
    /// engine received the error from another.
    pub(crate) fn abandon(mut self, cause: TransferError) {
        self.release_after(&cause);
        self.parts.finalizer.result = Some(Err(cause));
        catch_foreign_panic(|| drop(self));
    }

    /// Checks whether the job may start, once all its predecessors have ended.
    pub(crate) fn check_start(&self, allow_incomplete: bool) -> Result<(), TransferError> {
        self.parts.claims.reading.check_start(allow_incomplete)?;
        self.parts.claims.writing.check_start(allow_incomplete)
    }

    /// Releases the claims of a transfer that fails with this error.
    fn release_after(&self, cause: &TransferError) {
        // A part that was orphaned keeps the claims, and may still access the blocks.
        if !cause.is_refusal() && Arc::strong_count(&self.parts.claims) > 1 {
            self.orphan_claims();
        }
        // The deadline may pass while a job waits for its turn.
        let never_started = matches!(cause, TransferError::DeadlineExceeded { .. })
            && self.parts.finalizer.started.get().is_none();
        if (cause.is_refusal() || never_started) && !self.parts.is_part {
            self.parts.claims.writing.has_written(Written::Nothing);
        }
    }

    /// Orphans the claims of a transfer that fails: they remain.
    fn orphan_claims(&self) {
        if !self.parts.is_part {
            self.parts.claims.reading.orphan();
            self.parts.claims.writing.orphan();
        }
    }

    fn describe(&self, failure: CopyFailure) -> TransferError {
        match failure {
            CopyFailure::Run { index, offset, source } => {
                match self.parts.plan.run(index).zip(self.parts.plan.blocks_of(index, offset)) {
                    Some((run, blocks)) => TransferError::Copy {
                        source_block: blocks.source,
                        destination_block: blocks.destination,
                        bytes: run.bytes(),
                        source,
                    },
                    None => TransferError::Engine {
                        engine: self.parts.finalizer.explanation.engine,
                        source,
                    },
                }
            }
            CopyFailure::Engine { source } => {
                TransferError::Engine { engine: self.parts.finalizer.explanation.engine, source }
            }
            CopyFailure::DeadlineExceeded => TransferError::DeadlineExceeded {
                after: self.parts.finalizer.submitted.elapsed(),
                done: self.parts.progress.copied(),
                total: self.parts.plan.bytes(),
            },
            CopyFailure::Cancelled => self.cancelled(),
        }
    }
}

terrane_core::debug_fields!(CopyJob, |job| {
    transfer: job.parts.finalizer.ticket.id(),
    explanation: job.parts.finalizer.explanation
});

/// The resources of a transfer that was [orphaned](CopyJob::orphan): the memory at both ends, and
/// the claims on its blocks.
///
/// Transfers of the blocks are refused until it drops, and so is
/// [`Endpoint::hold_for_write`](crate::Endpoint::hold_for_write). The engine drops it when it knows
/// that the copy has ended. If the engine cannot know that, it never drops it (`ManuallyDrop`).
#[must_use = "dropping it states that nothing accesses the memory any more"]
pub struct Orphaned {
    // Fields drop in this order, as in `CopyJob`.
    plan: TransferPlan,
    _claims: Arc<TransferClaims>,
}

terrane_core::debug_fields!(Orphaned, |this| (this.plan));

/// The reason why an engine failed to execute a job.
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
        /// The cause.
        source: BoxedCause,
    },
    /// The engine failed as a whole.
    Engine {
        /// The cause.
        source: BoxedCause,
    },
    /// The job's deadline passed.
    DeadlineExceeded,
    /// The job was [cancelled](CopyJob::is_cancelled).
    Cancelled,
}
