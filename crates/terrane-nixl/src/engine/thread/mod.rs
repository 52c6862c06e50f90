//! The engine's thread.

mod backoff;
pub(super) mod queue;

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_transfer::CopyFailure;

use super::context::EngineContext;
use super::transfer::orphaned::{OrphanPoll, OrphanedRequests};
use super::transfer::request::Outstanding;
use super::transfer::shared::{AdvanceResult, SUBMITTER_WINDOW, SharedTransfer};
use backoff::Backoff;
use queue::{CloseOnDrop, Queue, QueuedJob};

/// The state of the engine's thread.
pub(super) struct EngineThread {
    context: Arc<EngineContext>,
    queue: Arc<Queue>,
    transfers: Vec<PolledTransfer>,
    orphaned: Vec<OrphanedRequests>,
    /// The time until which no transfer needs polling; `None` if one does.
    idle_until: Option<Instant>,
    /// Until this time, the thread checks for new jobs once in every [submitter's
    /// window](SUBMITTER_WINDOW).
    awake_until: Option<Instant>,
}

/// A transfer, in the state in which the engine's thread last saw it.
struct PolledTransfer {
    transfer: Arc<SharedTransfer>,
    /// Another thread advances the transfer until this time. If that thread stops earlier, it
    /// reports that.
    skip_until: Option<Instant>,
}

/// The time for which the thread stays awake after a submission. Later submitters then need not
/// wake it, which would take as long as copying a block of 128 KiB.
const STAY_AWAKE: Duration = Duration::from_millis(1);

impl EngineThread {
    pub(super) fn new(context: Arc<EngineContext>, queue: Arc<Queue>) -> Self {
        let (transfers, orphaned) = (Vec::new(), Vec::new());
        Self { context, queue, transfers, orphaned, idle_until: None, awake_until: None }
    }

    /// Serves until the engine has dropped and all transfers have ended, or until a panic.
    pub(super) fn run(mut self) {
        // Dropped before the transfers, whose drops may submit another transfer.
        let _close = CloseOnDrop(Arc::clone(&self.queue));
        let mut backoff = Backoff::new(self.context.options.busy_poll);
        let mut orphan_poll = OrphanPoll::new();
        let (mut is_closed, mut drop_deadline) = (false, None);
        loop {
            let contents = self.queue.take(self.delay(&backoff, is_closed), is_closed);
            is_closed = contents.is_closed;
            if !contents.jobs.is_empty() {
                self.awake_until = Some(Instant::now() + STAY_AWAKE);
                backoff.reset();
            }
            if contents.is_woken {
                backoff.reset();
            }
            if contents.is_woken || is_closed {
                self.transfers.iter_mut().for_each(|polled| polled.skip_until = None);
            }
            for job in contents.jobs {
                self.accept(job);
            }
            if self.advance() {
                backoff.reset();
            }
            if !self.orphaned.is_empty() && orphan_poll.is_due() {
                let agent = &self.context.agent;
                self.orphaned.retain_mut(|orphaned| orphaned.poll(agent) == Outstanding::Some);
            }
            if is_closed && self.transfers.is_empty() {
                let timeout = self.context.options.drop_timeout;
                // `None` for a timeout beyond the clock's range.
                let deadline =
                    *drop_deadline.get_or_insert_with(|| Instant::now().checked_add(timeout));
                let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
                if self.orphaned.is_empty() || is_late {
                    return;
                }
            }
        }
    }

    /// The time to wait for a job before the next poll.
    fn delay(&self, backoff: &Backoff, is_closed: bool) -> Option<Duration> {
        let now = Instant::now();
        let transfers = match self.idle_until {
            _ if self.transfers.is_empty() => None,
            Some(until) => Some(until.saturating_duration_since(now)),
            None => Some(backoff.delay().unwrap_or(Duration::ZERO)),
        };
        let awake = self.awake_until.filter(|until| now < *until).map(|_| SUBMITTER_WINDOW);
        let orphaned = (!self.orphaned.is_empty()).then_some(OrphanPoll::INTERVAL);
        let delay = [transfers, awake, orphaned].into_iter().flatten().min();
        delay.or(is_closed.then_some(Duration::ZERO))
    }

    fn accept(&mut self, job: QueuedJob) {
        match job {
            QueuedJob::Transfer(transfer) => {
                self.transfers.push(PolledTransfer { transfer, skip_until: None });
            }
            QueuedJob::Refused(job, cause) => {
                job.finish(Err(CopyFailure::Engine { source: cause.into() }));
            }
        }
    }

    /// Polls once each transfer that no other thread advances. Returns whether anything has
    /// changed.
    fn advance(&mut self) -> bool {
        let (mut changed, mut needs_polls, mut idle_until) = (false, false, None::<Instant>);
        let (orphaned, now) = (&mut self.orphaned, Instant::now());
        self.transfers.retain_mut(|polled| {
            if polled.skip_until.is_none_or(|until| until <= now) {
                polled.skip_until = None;
                match polled.transfer.advance_on_engine(now) {
                    AdvanceResult::LeftToSubmitter(until) => polled.skip_until = Some(until),
                    AdvanceResult::AdvancedByOtherThread(recheck) => {
                        polled.skip_until = Some(now + recheck)
                    }
                    AdvanceResult::Unchanged => {}
                    AdvanceResult::Changed => changed = true,
                    AdvanceResult::Ended(requests) => {
                        changed = true;
                        orphaned.extend(requests.map(|requests| *requests));
                        return false;
                    }
                }
            }
            match (polled.skip_until, idle_until) {
                (None, _) => needs_polls = true,
                (Some(until), Some(earlier)) => idle_until = Some(until.min(earlier)),
                (Some(until), None) => idle_until = Some(until),
            }
            true
        });
        self.idle_until = idle_until.filter(|_| !needs_polls);
        changed
    }
}
