//! Why an engine cannot copy a plan.

use crate::side::Side;

/// Why an engine declines a plan.
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
    /// It does not support the device order that the transfer states.
    #[error("cannot run after a device's stream or event")]
    DeviceOrder,
    /// Memory at one end is not locked for the device yet, or the locked part does not include
    /// these blocks.
    #[error("memory at one end has not come up as far as these blocks; wait until it has")]
    ComingUp,
    /// It copies whole pieces only, or cannot address the bytes of this plan individually.
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
    /// Both ends are registered, but no backend can copy between them.
    #[error(
        "no backend of its agent accepted the memory at both ends; add one that takes both kinds, or \
         go by way of memory that one takes"
    )]
    NoCommonBackend,
    /// One layer of a block is larger than the bounce buffers.
    #[error("one layer of a block does not fit in a bounce slot; make the slots larger")]
    SlotTooSmall,
}
