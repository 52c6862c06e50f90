//! The reasons why an engine cannot copy a plan.

use crate::side::Side;

/// Why an engine declines a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Declined {
    /// The engine does not copy between these kinds of storage.
    #[error("does not copy between these kinds of storage")]
    Kinds,
    /// The engine belongs to the process that this one was forked from.
    #[error(
        "belongs to the process that this one was forked from; create an engine after the fork"
    )]
    Forked,
    /// The engine does not support the transfer's device order.
    #[error(
        "cannot run after a stream or event of a device; wait for it on the host, and state \
         DeviceOrder::AlreadySynchronised"
    )]
    DeviceOrder,
    /// Memory at one end is not locked for the device yet, or the locked part does not include
    /// these blocks.
    #[error("the memory of these blocks is not locked for the device yet; wait until it is ready")]
    MemoryNotReady,
    /// The engine copies whole pieces only, or cannot address the bytes of this plan individually.
    #[error(
        "cannot copy parts of pieces between these ends; use equal token orders, and copy all heads"
    )]
    BrokenPieces,
    /// The engine lists the runs of broken-up pieces, and the plan has too many.
    #[error(
        "cannot list {runs} runs of pieces that are broken up, at most {limit}; copy fewer blocks at \
         once, or use layouts with equal token orders"
    )]
    TooManyRuns {
        /// The number of runs of the plan.
        runs: u64,
        /// The maximum number.
        limit: u64,
    },
    /// The engine cannot provide the durability that the transfer requires.
    #[error(
        "cannot make writes durable; leave the durability out, and sync the file after the transfer"
    )]
    Durability,
    /// The memory at one end is not registered with the agent through which the engine copies.
    #[error(
        "the memory of the {0} is not registered with its agent; build the layout with \
         `.register(&agent)`"
    )]
    NotRegistered(Side),
    /// The peer has been forgotten, or another agent knows it.
    #[error("its agent does not know the peer; import the peer's layout again")]
    UnknownPeer,
    /// Both ends are registered, but no backend can copy between them.
    #[error(
        "no backend of its agent accepted the memory at both ends; add one that accepts both kinds, or \
         copy through memory that one accepts"
    )]
    NoCommonBackend,
    /// A backend can copy between both ends, and has too few I/Os left for a request. The others
    /// belong to requests whose end is not known.
    #[error(
        "has too few I/Os left for a request: failed requests, whose end is not known, keep them; \
         create another agent"
    )]
    NoIosLeft,
    /// The engine computes no checksums, or none between these ends.
    #[error(
        "computes no checksums between these ends; leave the checksums out, copy through host memory, \
         or build with the feature `checksum`"
    )]
    Checksums,
    /// The engine computes checksums with kernels, and has none.
    #[error(
        "computes checksums with kernels, and has none, for a reason that its capabilities state; \
         leave the checksums out, or copy through host memory"
    )]
    ChecksumKernels,
    /// The engine's checksum kernels cannot address the blocks of this layout.
    #[error(
        "its kernels compute no checksums of blocks of 2 GiB or more, nor of blocks with rows in \
         several regions, nor with a region for each layer of each block; leave the checksums out, use \
         another layout on the device, or copy through host memory"
    )]
    ChecksumLayout,
    /// One layer of a block is larger than a bounce slot.
    #[error("one layer of a block is larger than a bounce slot; increase RelayOptions::slot_bytes")]
    SlotTooSmall,
}
