//! Validates transfers, chooses their engines, and keeps their order.

pub(crate) mod builder;
pub(crate) mod submit_all;

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use terrane_core::StorageKind;

use crate::checksums::check;
use crate::completion::end_sink::EndSink;
use crate::completion::layers::{LayerSignals, Layers};
use crate::completion::pair;
use crate::completion::waiter_progress::DEFAULT_SPIN;
use crate::completion::{Completion, layers};
use crate::engine::declined::Declined;
use crate::engine::finalizer::OutcomeSink;
use crate::engine::job::CopyJob;
use crate::engine::job::TransferClaims;
use crate::engine::order::DeviceOrder;
use crate::engine::quote::Quote;
use crate::engine::{CopyEngine, quote};
use crate::error::{Rejected, TransferError};
use crate::explain::Explanation;
use crate::hazard::conflict::Access;
use crate::hazard::deferred::submit_after;
use crate::hazard::endpoint::Endpoint;
use crate::hazard::table::incomplete::Area;
use crate::hazard::table::{ALL_TOKENS, BlockUse, no_conflicts};
use crate::hazard::ticket::Ticket;
use crate::metrics::TransferMetrics;
use crate::metrics::snapshot::TransferSnapshot;
use crate::plan::TransferPlan;
use crate::plan::planner::Planner;
use crate::side::Side;
use crate::transfer::{Predecessor, Transfer};
use terrane_core::Durability;

/// Plans, explains and submits transfers over a set of engines.
///
/// Clones share all state. Transfers in flight continue after the last clone drops, including those
/// that wait for others.
///
/// # What happens to a transfer
///
/// The manager validates and [plans](Planner::plan) it, and gets a [`Quote`] from every engine. It
/// chooses the engine with the shortest predicted time. It claims the blocks at both ends, or
/// refuses the transfer with the conflicting blocks. The transfer waits for its predecessors, and
/// is then submitted to its engine. Submitting takes microseconds, never waits for a copy, and
/// copies nothing itself.
///
/// # After `fork`
///
/// A forked child has none of the engines' threads. There, a transfer over a manager or an endpoint
/// of the parent is refused with [`TransferError::Forked`]. A wait for a transfer of the parent
/// returns [`TransferError::LostByFork`] and the guard at once, even if the transfer has ended. The
/// child may drop managers, engines, endpoints, holds and completions of the parent. This joins no
/// thread. Memory that only the threads could free stays allocated until the child exits. The
/// transfers continue in the parent. A child that transfers blocks creates its own engines, manager
/// and endpoints.
#[derive(Clone, Debug)]
pub struct TransferManager {
    engines: Arc<[Arc<dyn CopyEngine>]>,
    planner: Planner,
    spin: Duration,
    metrics: Arc<TransferMetrics>,
}

impl TransferManager {
    /// Creates a manager with these engines. If several engines predict the same time, the first is
    /// chosen.
    #[must_use]
    pub fn new(engines: impl IntoIterator<Item = Arc<dyn CopyEngine>>) -> Self {
        let engines = engines.into_iter().collect();
        let metrics = Arc::new(TransferMetrics::new());
        Self { engines, planner: Planner::new(), spin: DEFAULT_SPIN, metrics }
    }

    /// Sets the time for which a waiting thread polls its engine before it sleeps. Only engines
    /// that [invite](crate::WaiterProgress) waiting threads are polled. With zero, threads sleep at
    /// once.
    #[must_use]
    pub fn with_spin(self, spin: Duration) -> Self {
        Self { spin, ..self }
    }

    /// Creates a manager with the engines that every machine has, with their default options. They
    /// copy within host memory, and between host memory and files.
    ///
    /// Devices need another engine (`DeviceEngine` of `terrane-cuda`); pass it to
    /// [`new`](Self::new) together with these.
    ///
    /// Their threads are joined when the last clone has dropped and the last transfer has ended. If
    /// that happens on one of these threads, they exit by themselves.
    ///
    /// # Errors
    ///
    /// [`TransferError::EngineNotStarted`] if a thread cannot be started or the I/O queue cannot be
    /// created.
    pub fn with_default_engines() -> Result<Self, TransferError> {
        Ok(Self::builder().host()?.disk()?.build())
    }

    /// The transfers so far, by path. It reads the counters of all processors, without a lock.
    #[must_use]
    pub fn snapshot(&self) -> TransferSnapshot {
        self.metrics.snapshot()
    }

    /// The engines, in the order in which the manager queries them.
    #[must_use]
    pub fn engines(&self) -> &[Arc<dyn CopyEngine>] {
        &self.engines
    }

    /// Explains how a submission would execute the transfer, and why. It claims nothing.
    ///
    /// # Errors
    ///
    /// The refusals of [`TransferError`], except [`Conflict`](TransferError::Conflict),
    /// [`Incomplete`](TransferError::Incomplete) and
    /// [`OrderNotCaptured`](TransferError::OrderNotCaptured).
    pub fn explain(&self, transfer: &Transfer) -> Result<Explanation, TransferError> {
        let plan = self.planner.plan(transfer)?;
        let (engine, quote, declined) = self.choose(transfer, &plan)?;
        Ok(Explanation::new(&plan, engine.name(), quote, declined))
    }

    /// Starts a transfer, which keeps `guard`: any value that must live until the copy has ended,
    /// such as a lock on the caller's tables. The guard is returned with the outcome, or at once
    /// with the refusal.
    ///
    /// # What runs as a transfer ends
    ///
    /// Some foreign code runs on the thread that ends the transfer: wakers, and the drops of owners
    /// of adopted memory, streams and events. A guard drops there if its completion was dropped.
    /// The thread is an engine's, or one that waits for another transfer.
    ///
    /// This code must not wait for a transfer, nor for a thread that waits for one. The blocked
    /// thread may be the one that ends that transfer: a relay, for example, ends all of its
    /// transfers on one thread. Code that must wait needs a separate thread. It may submit other
    /// transfers.
    ///
    /// # Errors
    ///
    /// [`Rejected`] with a refusal of [`TransferError`]; nothing has been copied or claimed.
    pub fn submit<G: Send + 'static>(
        &self,
        transfer: Transfer,
        guard: G,
    ) -> Result<Completion<G>, Rejected<G>> {
        match self.prepare(transfer) {
            Ok(prepared) => Ok(prepared.start(guard)),
            Err(cause) => Err(Rejected { guard, cause }),
        }
    }

    /// Starts a transfer, and reports its end to `sink`. The transfer keeps the sink until then.
    /// This costs less than a [completion](Self::submit). Callers can wait for the ticket, and get
    /// no [`Layers`](crate::Layers).
    ///
    /// # Errors
    ///
    /// A refusal of [`TransferError`]; nothing has been copied or claimed, and `sink` is not
    /// called.
    pub fn submit_to<S: EndSink>(
        &self,
        transfer: Transfer,
        sink: Arc<S>,
    ) -> Result<Ticket, TransferError> {
        Ok(self.prepare(transfer)?.start_to(sink))
    }

    pub(crate) fn prepare(&self, transfer: Transfer) -> Result<Prepared, TransferError> {
        let prepared = self.try_prepare(transfer);
        if prepared.is_err() {
            self.metrics.refused();
        }
        prepared
    }

    // Not inlined, so that the transfer is not moved once more.
    #[inline(never)]
    fn try_prepare(&self, mut transfer: Transfer) -> Result<Prepared, TransferError> {
        let plan = self.planner.plan(&transfer)?;
        let (engine, quote, declined) = self.choose(&transfer, &plan)?;
        let (name, label) = (engine.name(), quote.decision.get().label());
        let engine = Arc::clone(engine);
        capture_order(&mut transfer, &*engine)?;
        let (ticket, claims) = claim(&transfer, &plan)?;
        let counted =
            self.metrics.path_of(name, label, plan.source().kind(), plan.destination().kind());
        let Transfer { destination_blocks, after, allow_incomplete, options, .. } = transfer;
        let (claims, progress) = (Arc::new(claims), Arc::default());
        let explanation = Explanation::new(&plan, name, quote, declined);
        let mut job = CopyJob::new(plan, claims, options, progress, ticket, explanation, counted);
        job.compute_checksums(&destination_blocks);
        Ok(Prepared { job, engine, after, allow_incomplete, spin: self.spin })
    }

    /// Returns the engine with the shortest predicted time, its quote, and the reasons of engines
    /// that declined.
    fn choose(
        &self,
        transfer: &Transfer,
        plan: &TransferPlan,
    ) -> Result<Choice<'_>, TransferError> {
        check_options(transfer)?;
        if let Some(wanted) = &transfer.options.checksums {
            check::check(wanted, plan)?;
        }
        let mut best: Option<(&Arc<dyn CopyEngine>, Quote)> = None;
        let mut declined: Vec<(&'static str, Declined)> = Vec::new();
        for engine in self.engines.iter() {
            match quote(&**engine, plan, &transfer.options) {
                Ok(quote) => {
                    if best.as_ref().is_none_or(|(_, b)| quote.predicted < b.predicted) {
                        best = Some((engine, quote));
                    }
                }
                Err(why) => declined.push((engine.name(), why)),
            }
        }
        match best {
            Some((engine, quote)) => Ok((engine, quote, declined)),
            None => {
                let (from, to) = (transfer.source.kind(), transfer.destination.kind());
                Err(TransferError::NoEngine { from, to, declined })
            }
        }
    }
}

type Choice<'a> = (&'a Arc<dyn CopyEngine>, Quote, Vec<(&'static str, Declined)>);

/// A validated and claimed transfer that is ready to start.
pub(crate) struct Prepared {
    job: CopyJob,
    engine: Arc<dyn CopyEngine>,
    after: Vec<Predecessor>,
    allow_incomplete: bool,
    spin: Duration,
}

impl Prepared {
    pub(crate) fn ticket(&self) -> &Ticket {
        self.job.ticket()
    }

    /// Releases the blocks: nothing was copied.
    pub(crate) fn cancel(self) {
        self.job.withdraw();
    }

    pub(crate) fn start<G: Send + 'static>(self, guard: G) -> Completion<G> {
        let (layers, signals) = self.layers();
        let (ticket, progress) = (self.job.ticket().clone(), Arc::clone(self.job.progress()));
        let (completion, sink) = pair(ticket, progress, layers, self.spin, guard);
        self.connect(sink, signals);
        completion
    }

    /// Starts it without a completion.
    fn start_to(self, sink: Arc<dyn OutcomeSink>) -> Ticket {
        let ticket = self.job.ticket().clone();
        let (_, signals) = self.layers();
        self.connect(sink, signals);
        ticket
    }

    /// Both ends of the layers, if they are reported.
    fn layers(&self) -> (Option<Layers>, Option<LayerSignals>) {
        let job = &self.job;
        let layer_by_layer = job.options().layer_by_layer;
        layer_by_layer.then(|| layers::pair(job.plan().layers(), self.spin)).unzip()
    }

    fn connect(self, sink: Arc<dyn OutcomeSink>, signals: Option<LayerSignals>) {
        let Self { mut job, engine, after, allow_incomplete, .. } = self;
        job.connect(sink, signals);
        submit_after(&after, allow_incomplete, job, engine);
    }
}

/// Checks that the transfer's options fit its two ends.
fn check_options(transfer: &Transfer) -> Result<(), TransferError> {
    let ends = [(Side::Source, &transfer.source), (Side::Destination, &transfer.destination)];
    let device = ends.into_iter().find(|(_, end)| matches!(end.kind(), StorageKind::Device(_)));
    match (device, &transfer.options.device_order) {
        (Some((side, end)), None) => Err(TransferError::OrderNotStated { side, kind: end.kind() }),
        (None, Some(_)) => Err(TransferError::OrderWithoutDevice),
        _ if transfer.options.durability != Durability::None
            && transfer.destination.kind() != StorageKind::Disk =>
        {
            Err(TransferError::DurabilityWithoutFile { kind: transfer.destination.kind() })
        }
        _ if transfer.options.notification.is_some()
            && !ends.into_iter().any(|(_, end)| end.kind().is_remote()) =>
        {
            let (from, to) = (transfer.source.kind(), transfer.destination.kind());
            Err(TransferError::NotificationWithoutPeer { from, to })
        }
        _ => Ok(()),
    }
}

/// Captures the device order of a transfer that waits for others, with its present meaning. Later
/// work on the stream, or another recording of the event, does not change it.
fn capture_order(transfer: &mut Transfer, engine: &dyn CopyEngine) -> Result<(), TransferError> {
    let order = match &transfer.options.device_order {
        None | Some(DeviceOrder::AlreadySynchronised) => return Ok(()),
        Some(_) if transfer.after.is_empty() => return Ok(()),
        Some(order) => order,
    };
    let captured = engine
        .capture_order(order)
        .map_err(|source| TransferError::OrderNotCaptured { engine: engine.name(), source })?;
    transfer.options.device_order = Some(captured);
    Ok(())
}

/// Checks for conflicts at both ends and claims the blocks, atomically.
fn claim(
    transfer: &Transfer,
    plan: &TransferPlan,
) -> Result<(Ticket, TransferClaims), TransferError> {
    let used = |(side, access)| BlockUse {
        access,
        blocks: plan.blocks(side),
        group: plan.end(side).group(),
        area: Area {
            layers: plan.layers(),
            heads: plan.heads(side),
            tokens: plan
                .tokens(side)
                .map_or(ALL_TOKENS, |tokens| plan.end(side).numbers_of_tokens(tokens)),
        },
    };
    let [read, write] =
        [(Side::Source, Access::Read), (Side::Destination, Access::Write)].map(used);
    // A chain of predecessors can be long, so it is walked only if there is a conflict.
    let predecessors = OnceCell::new();
    let tickets = || transfer.after.iter().map(|predecessor| &predecessor.ticket);
    let precedes = |id| predecessors.get_or_init(|| Ticket::closure(tickets())).contains(&id);

    let (mut source, mut destination) =
        Endpoint::lock_both(&transfer.source, &transfer.destination);
    let mut checked = Ok(());
    let reads_freely = source.count(&read);
    if !(destination.as_mut().unwrap_or(&mut source).count(&write) && reads_freely) {
        // The search skips blocks that are not in use, so it must not see these claims.
        source.uncount(&read);
        destination.as_mut().unwrap_or(&mut source).uncount(&write);
        let mut conflicts = source.conflicts(&read, &precedes);
        let written = destination.as_mut().unwrap_or(&mut source);
        conflicts.extend(written.conflicts(&write, &precedes));
        let _ = written.count(&write);
        let _ = source.count(&read);
        checked = no_conflicts(conflicts);
    }
    // A transfer with predecessors checks this when they have ended, because they may write the
    // incomplete parts.
    if transfer.after.is_empty() && !transfer.allow_incomplete {
        checked = checked.and_then(|()| source.check_complete(&read));
    }
    if checked.is_err() {
        source.uncount(&read);
        destination.as_mut().unwrap_or(&mut source).uncount(&write);
    }
    checked?;
    let ticket = Ticket::new(tickets().cloned());
    let reading = source.claim(&ticket, &read);
    let writing = destination.as_mut().unwrap_or(&mut source).claim(&ticket, &write);
    let claims = TransferClaims { reading, writing, ticket: ticket.clone() };
    Ok((ticket, claims))
}
