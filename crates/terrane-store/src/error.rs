//! Errors of the store, of keys and of completion queues.

use std::path::PathBuf;

use terrane_core::{AllocateError, ByteCount, ForkedProcess, OsError, StorageKind};
use terrane_layout::LayoutError;
use terrane_storage::StorageError;
use terrane_transfer::{BytesInUse, SlotsError, TransferError};

use crate::MAX_KEY_BYTES;
use crate::disk::CatalogError;
use crate::store::query::presence::TierId;

/// Why the store refused a call, or stopped serving.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store was used in a process that was forked from its own.
    #[error(
        "the store belongs to the process that this one was forked from; open one after the fork"
    )]
    Forked(#[from] ForkedProcess),
    /// The store is closed.
    #[error("the store is closed; open it again")]
    Closed,
    /// The catalog of the disk tier refused or failed.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// A layout was refused.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A copy between two endpoints was refused or failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The block ids of a memory tier have another owner.
    #[error(transparent)]
    Slots(#[from] SlotsError),
    /// The completion queue refuses the job.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// A key is refused.
    #[error("key {index} of the job is refused; see the cause")]
    Key {
        /// The index of the key.
        index: usize,
        /// The rule that it breaks.
        #[source]
        source: KeyError,
    },
    /// The blocks of a job are in device memory, and it does not state its device order.
    #[error(
        "the job's blocks are memory of {kind}, and it states no device order; add one \
         (JobOptions::device_order)"
    )]
    DeviceOrderNotStated {
        /// The kind of the memory.
        kind: StorageKind,
    },
    /// A job states a device order, and its blocks are in host memory.
    #[error("the job states a device order, but its blocks are not device memory; leave it out")]
    DeviceOrderWithoutDevice,
    /// The numbers of keys and of blocks differ.
    #[error("{keys} keys and {blocks} blocks; state one block for each key")]
    Counts {
        /// The number of keys.
        keys: usize,
        /// The number of blocks, or of their numbers of tokens.
        blocks: usize,
    },
    /// The store has no such group.
    #[error("group {group} was named; the store has {groups} groups, numbered from 0")]
    NoSuchGroup {
        /// The index of the group.
        group: u16,
        /// The number of groups.
        groups: usize,
    },
    /// The store has no such tier.
    #[error("{tier} was named; the store has {tiers} tiers, numbered from 0")]
    NoSuchTier {
        /// The tier.
        tier: TierId,
        /// The number of tiers.
        tiers: usize,
    },
    /// The tier is the disk.
    #[error("{tier} is the disk tier; promote blocks to a memory tier")]
    NotAMemoryTier {
        /// The tier.
        tier: TierId,
    },
    /// A block has no bytes, or more than a slot.
    #[error("block {index} has {bytes} bytes; blocks of the group have 1 to {limit}")]
    BlockLength {
        /// The index of the block in the job.
        index: usize,
        /// Its length in bytes.
        bytes: u64,
        /// The bytes of a slot.
        limit: u64,
    },
    /// Two blocks of a get have the same destination.
    #[error(
        "blocks {first} and {second} of a get share bytes of their destinations; separate them"
    )]
    DestinationNamedTwice {
        /// The index of one block.
        first: usize,
        /// The index of the other one.
        second: usize,
    },
    /// The endpoint has no such block or not so many tokens.
    #[error(
        "block {block}{} is not within the endpoint, which has {num_blocks} blocks; name its blocks, and at \
         most the tokens of a block",
        .tokens.map(|tokens| format!(" with {tokens} tokens")).unwrap_or_default()
    )]
    NoSuchBlock {
        /// The block id.
        block: u32,
        /// The number of tokens; `None` for a whole block.
        tokens: Option<u32>,
        /// The blocks of the endpoint.
        num_blocks: u32,
    },
    /// The blocks of an endpoint have another shape than the group.
    #[error(
        "the blocks of the endpoint differ from those of group {group}; use layouts of equal shape"
    )]
    OtherShape {
        /// The group.
        group: usize,
    },
    /// Blocks that the host cannot address need a memory tier that it can.
    #[error(
        "the blocks are in {kind} memory and no tier of host memory can relay them; add a memory tier, \
         or use host memory"
    )]
    NeedsHostTier {
        /// The kind of memory.
        kind: StorageKind,
    },
    /// The store was built with too few or too many groups or tiers.
    #[error(
        "{groups} groups and {tiers} tiers were configured; a store needs 1 to 64 groups, 1 tier or \
         more, and at most 8 memory tiers"
    )]
    GroupOrTierCount {
        /// The number of groups.
        groups: usize,
        /// The number of tiers, the disk included.
        tiers: usize,
    },
    /// The disk tier has no namespace.
    #[error(
        "a disk tier needs a namespace; state the model, and everything that its blocks depend on"
    )]
    NoNamespace,
    /// The bytes of a tier are for no block of a group, or for more than 2^32 - 1.
    #[error(
        "tier {tier:?} has {bytes} for group {group}, whose blocks take {slot_bytes} each; state bytes \
         for 1 to 2^32 - 1 blocks of each group"
    )]
    TierTooSmall {
        /// The name of the tier.
        tier: String,
        /// The group.
        group: usize,
        /// The bytes of the tier for the group.
        bytes: ByteCount,
        /// The bytes of a slot.
        slot_bytes: ByteCount,
    },
    /// The memory that an allocator returned for a tier belongs to another endpoint.
    #[error(
        "the allocator of tier {tier:?} returned memory for group {group} that another endpoint uses; \
         see the cause, and pass an allocator of new memory"
    )]
    MemoryInUse {
        /// The name of the tier.
        tier: String,
        /// The group.
        group: usize,
        /// The error of the endpoint, with the layout.
        #[source]
        source: Box<BytesInUse>,
    },
    /// A memory tier needs one endpoint for each group.
    #[error(
        "memory tier {tier:?} has {endpoints} endpoints and the store has {groups} groups; pass one \
         endpoint for each group"
    )]
    EndpointCount {
        /// The name of the tier.
        tier: String,
        /// The number of its endpoints.
        endpoints: usize,
        /// The number of groups.
        groups: usize,
    },
    /// A thread could not be started.
    #[error("the thread {name:?} could not be started; raise the limit of threads")]
    Thread {
        /// The name of the thread.
        name: &'static str,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// A read of the disk tier failed.
    #[error("a read of the disk tier failed; check the device and the kernel's log")]
    ReadFailed(#[source] terrane_storage::IoFailure),
    /// The kernel gave no random bytes for the secret of the store.
    #[error("the kernel gave no random bytes for the secret of the store; allow getrandom(2)")]
    Random {
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// A file of metrics could not be written.
    #[error("cannot write metrics to {path:?}; check the directory, its permissions and its space")]
    Export {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        #[source]
        source: std::io::Error,
    },
    /// A slab file, the I/O queue or a thread was refused. [`StorageError::NoSpace`] states the
    /// bytes that a file needs.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Memory was refused.
    #[error(transparent)]
    Memory(#[from] AllocateError),
    /// No directory was stated for the slab files.
    #[error("a disk tier needs a directory; state one or more")]
    NoDirectory,
    /// The slots of a group exceed the largest file.
    #[error(
        "group {group} has {slots} slots of {slot_bytes} bytes, more than the largest file offset, \
         2^63 - 1; state fewer slots"
    )]
    SlotsTooLarge {
        /// The group.
        group: usize,
        /// Its slots.
        slots: u32,
        /// The bytes of a slot.
        slot_bytes: u64,
    },
    /// Direct I/O is required, and the store's slots are not aligned for it.
    #[error(
        "direct I/O was required and needs slots at multiples of {needed} bytes; those of the store are \
         at multiples of {recorded}: prefer direct I/O instead, or remove the store's folders to begin \
         with an empty store"
    )]
    SlotAlignment {
        /// The alignment of the store's slots in bytes.
        recorded: u64,
        /// The alignment that direct I/O needs.
        needed: u64,
    },
    /// A file could not be synced. Bytes written to it since the last sync may be lost. The file
    /// is not synced again, because a later success would say nothing about those bytes.
    #[error(
        "cannot sync {path:?}; bytes written since the last sync may be lost; check the device, \
         then open the store again"
    )]
    SyncFailed {
        /// The file.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// A call on a slab file failed.
    #[error("cannot create or open the slab file {path:?}; check its permissions and the mount")]
    SlabFile {
        /// The file, or its directory.
        path: PathBuf,
        /// The error of the kernel.
        #[source]
        source: OsError,
    },
    /// The tier was opened for reading only.
    #[error("the disk tier was opened read-only; open it for writing to put blocks")]
    ReadOnly,
    /// A store that is not persistent clears its directory, and a read-only tier cannot be cleared.
    #[error("`read_only(true)` and `persistent(false)` exclude each other; drop one of them")]
    ReadOnlyNotPersistent,
    /// A write failed because of the device or its space.
    #[error(
        "a write failed, so the disk tier is read-only; free space or check the device, then open \
             the store again"
    )]
    WriteFailed(#[source] terrane_storage::IoFailure),
    /// A request names a group, a slot or a length that the slab files do not have.
    #[error(
        "{bytes} bytes for slot {slot} of group {group} exceed the slab files; state an existing group \
         and slot, and 1 byte to the slot's size"
    )]
    OutsideSlabs {
        /// The group.
        group: u16,
        /// The slot.
        slot: u32,
        /// The bytes of the block.
        bytes: u64,
    },
}

/// Why a key is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The key has no bytes.
    #[error(
        "a key has no bytes; state 1 to {MAX_KEY_BYTES} bytes, such as a hash of the block's tokens"
    )]
    Empty,
    /// The key is longer than its length field can state.
    #[error("a key has {bytes} bytes; the maximum is {MAX_KEY_BYTES}: use a hash of it as the key")]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
    },
}

/// Why a [`CompletionQueue`](crate::CompletionQueue) refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A queue of capacity zero could take no job.
    #[error("a completion queue of capacity 0 was requested; state 1 or more")]
    NoCapacity,
    /// The operating system gave no event descriptor.
    #[error(
        "no event descriptor for a completion queue (error {errno}); raise the limit of open files, \
         or close some"
    )]
    NoDescriptor {
        /// The error number.
        errno: i32,
    },
    /// Jobs and values that were not taken fill the queue.
    #[error(
        "a completion queue of capacity {capacity} has {jobs} jobs and {values} values that were not \
         taken; take them, or make the queue larger"
    )]
    Full {
        /// The capacity.
        capacity: usize,
        /// The jobs that have not ended.
        jobs: usize,
        /// The values that wait to be taken.
        values: usize,
    },
    /// The queue belongs to the process that this one was forked from.
    #[error(transparent)]
    Forked(#[from] ForkedProcess),
}
