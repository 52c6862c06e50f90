//! The contract of copy engines.

pub(crate) mod declined;
pub(crate) mod endpoint_cache;
pub(crate) mod finalizer;
pub(crate) mod job;
pub(crate) mod order;
pub(crate) mod quote;
pub(crate) mod rate;
pub mod threads;

use std::fmt;

use terrane_core::{BoxedCause, CapabilityReport};

use crate::plan::TransferPlan;
use crate::transfer::TransferOptions;
use declined::Declined;
use job::CopyJob;
use order::DeviceOrder;
use quote::Quote;

#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a copy engine",
    label = "it does not implement `CopyEngine`",
    note = "engines are `HostEngine`, `DiskEngine` and `RelayEngine` of `terrane_transfer::engines`, `DeviceEngine` of `terrane-cuda` and `NixlEngine` of `terrane-nixl`; pass an engine that is shared as `Arc<dyn CopyEngine>` to `TransferManagerBuilder::engines`"
)]
/// Executes copy runs between some kinds of storage.
///
/// # Contract
///
/// The transfer manager has validated every plan that an engine sees, in release builds too. All
/// runs lie within their regions, no two destination runs overlap, and no destination overlaps a
/// source. Nothing else in flight conflicts with them. An engine need not check again.
///
/// An engine guarantees:
///
/// - [`quote`](Self::quote) reads a plan and touches no bytes.
/// - A plan without runs is executed like any other. The job ends after the device's order, and
///   with durable files if its options ask for them.
/// - [`submit`](Self::submit) returns at once. It neither copies nor waits on the caller's thread.
/// - The job is [finished](CopyJob::finish) exactly once, whatever happens. A job that is dropped
///   unfinished ends with [`TransferError::EngineStopped`](crate::TransferError::EngineStopped).
/// - Its drop joins no thread if it runs on a thread that finishes jobs, whether its own or another
///   engine's. A job that waited for a job of another engine may have the last reference to this
///   one. Two engines that join each other's threads would deadlock. The functions of [`threads`]
///   follow this rule.
///
/// An engine may also:
///
/// - Report each layer of a [layer-by-layer](CopyJob::layers) job as soon as it can. Plans of such
///   jobs are in the order of the layers. Layers that it does not report are done, or have failed,
///   with the job.
/// - Stop a job that was [cancelled](CopyJob::reason_to_stop).
/// - Let waiting threads poll the engine, or copy for it: [`CopyJob::invite_waiters`].
///
/// # Safety
///
/// Finishing or dropping a job releases the memory at both ends and the caller's guard, and frees
/// its blocks for other transfers. So an implementor promises to touch only the bytes of the plan's
/// runs, and none of them after it has finished or dropped the job.
pub unsafe trait CopyEngine: Send + Sync + fmt::Debug + 'static {
    /// The engine's name in explanations and errors.
    fn name(&self) -> &'static str;

    /// Predicts how the engine would execute the plan, and how long that should take.
    ///
    /// # Errors
    ///
    /// [`Declined`] if the engine cannot copy the plan.
    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined>;

    /// Whether the engine computes [checksums](TransferOptions::checksums). If so, it
    /// [sets](CopyJob::set_checksum) one for each pair of blocks before it finishes such a job. Its
    /// quote can still decline some of these plans. An engine that computes none gets no such plan.
    fn computes_checksums(&self) -> bool {
        false
    }

    /// Executes the job in the background, by the [quote](Self::quote)'s decision
    /// ([`CopyJob::decision`]).
    fn submit(&self, job: CopyJob);

    /// Returns an order that preserves the current meaning of `order`, for a job that is
    /// [submitted](Self::submit) when its predecessors have ended. By then the stream may have more
    /// work, and the event may be recorded again. Like `submit`, this returns at once.
    ///
    /// # Errors
    ///
    /// The reason why the engine cannot capture it. The default implementation supports no orders
    /// of devices.
    fn capture_order(&self, order: &DeviceOrder) -> Result<DeviceOrder, BoxedCause> {
        let _ = order;
        Err(Box::new(Declined::DeviceOrder))
    }

    /// The capabilities that the engine requested when it was created, with their status. Empty if
    /// the engine requests nothing that a machine can refuse.
    fn capabilities(&self) -> CapabilityReport {
        CapabilityReport::default()
    }
}

/// The engine's quote. It declines checksums that it does not compute.
pub(crate) fn quote(
    engine: &dyn CopyEngine,
    plan: &TransferPlan,
    options: &TransferOptions,
) -> Result<Quote, Declined> {
    let quote = engine.quote(plan, options)?;
    if options.checksums.is_some() && !engine.computes_checksums() {
        return Err(Declined::Checksums);
    }
    Ok(quote)
}
