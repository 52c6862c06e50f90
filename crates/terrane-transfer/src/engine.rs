//! The contract of everything that copies.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use terrane_core::{BoxedCause, CapabilityReport};

use crate::{CopyJob, DeviceOrder, PinnedOrder, Side, Terms, TransferPlan};

/// Something that executes copy runs between some kinds of storage.
///
/// # Who owes what
///
/// The transfer manager has validated every plan that an engine sees, in release builds too:
/// all runs lie within their regions, no two destination runs overlap, no destination overlaps a
/// source, and nothing else in flight conflicts with them. An engine need not look again.
///
/// An engine owes four things in return:
///
/// - [`quote`](Self::quote) looks at a plan and touches nothing.
/// - A plan without runs is executed like any other: the job ends once what its terms state is so,
///   after the device's order and with durable files.
/// - [`submit`](Self::submit) returns at once. It neither copies nor waits on the caller's thread.
/// - The job is [finished](CopyJob::finish) exactly once, whatever happens. A job that is dropped
///   unfinished ends with [`TransferError::EngineStopped`](crate::TransferError::EngineStopped).
/// - Its drop waits for no thread if it runs on a thread that finishes jobs, its own or another
///   engine's: the last reference to an engine may go with a job that waited for one of another,
///   and two engines that wait for each other's threads would wait for ever. The functions of
///   [`threads`](crate::engines::threads) see to that.
///
/// Two things it may do besides:
///
/// - Of a job that is [layer-wise](CopyJob::layers), say what becomes of each layer as soon as it
///   can. Plans of such jobs are in the order of the layers. Layers of which it says nothing are
///   done, or have failed, with the job.
/// - Let threads that wait help to notice the end, or to come to it: [`CopyJob::attend`].
///
/// # Safety
///
/// Finishing or dropping a job lets go of the memory at both ends and of the caller's guard, and
/// clears its blocks for others. So an implementor promises that it touches only the bytes of the
/// plan's runs, and none of them after it has finished or dropped the job.
pub unsafe trait CopyEngine: Send + Sync + fmt::Debug + 'static {
    /// The engine's name in explanations and errors.
    fn name(&self) -> &'static str;

    /// Says how the engine would execute the plan, and how long that should take.
    ///
    /// # Errors
    ///
    /// [`Declined`] if it cannot.
    fn quote(&self, plan: &TransferPlan, terms: &Terms) -> Result<Quote, Declined>;

    /// Executes the job by the path of its [quote](Self::quote), in the background.
    fn submit(&self, job: CopyJob);

    /// Takes down what an order means now, for a job that is [submitted](Self::submit) later, when the
    /// transfers that it waits for have ended: its stream may have been given more work by then, and its
    /// event recorded again. It returns at once, as `submit` does.
    ///
    /// # Errors
    ///
    /// Why the engine cannot. By default it does not serve orders of devices.
    fn pin(&self, order: DeviceOrder) -> Result<PinnedOrder, BoxedCause> {
        let _ = order;
        Err(Box::new(Declined::DeviceOrder))
    }

    /// What the engine wished for when it was made, and what became of that. Empty for one that
    /// wishes for nothing that a machine can refuse.
    fn capabilities(&self) -> CapabilityReport {
        CapabilityReport::default()
    }
}

/// How an engine would execute a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Quote {
    /// The path: `"streaming copy"`, `"direct vectored"`.
    pub path: Cow<'static, str>,
    /// Why this one and no other of the engine's paths.
    pub reason: Cow<'static, str>,
    /// How long it should take once started.
    pub predicted: Duration,
}

/// Why an engine does not take a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Declined {
    /// It does not copy between these kinds of storage.
    #[error("does not copy between these kinds")]
    Kinds,
    /// It belongs to the process that this one was forked from.
    #[error(
        "belongs to the process that this one was forked from; make another one after the fork"
    )]
    Forked,
    /// It knows nothing of the device order that the transfer states.
    #[error("cannot run after a device's stream or event")]
    DeviceOrder,
    /// Memory at one end is not locked for the device yet, or only in part and not where these
    /// blocks are.
    #[error("memory at one end has not come up as far as these blocks; wait until it has")]
    ComingUp,
    /// It copies whole pieces only, or cannot reach the bytes of this plan one by one.
    #[error(
        "cannot copy parts of pieces, into which token orders or heads break them, at these ends"
    )]
    BrokenPieces,
    /// It cannot make writes durable as the transfer demands.
    #[error("cannot make writes durable")]
    Durability,
    /// The memory at one end is not registered with the agent through which the engine copies.
    #[error(
        "the memory of the {0} is not registered with its agent; build the layout with \
         `.register(&agent)`"
    )]
    NotRegistered(Side),
    /// The peer has been forgotten, or another agent knows it.
    #[error("its agent does not know the peer (any more); import the peer's layout again")]
    UnknownPeer,
    /// Both ends are registered, with no backend in common that could copy between them.
    #[error(
        "no backend of its agent accepted the memory at both ends; add one that takes both kinds, or \
         go by way of memory that one takes"
    )]
    NoCommonBackend,
    /// One layer of a block is larger than the buffers that it would pass through.
    #[error("one layer of a block does not fit in a bounce slot; make the slots larger")]
    SlotTooSmall,
}
