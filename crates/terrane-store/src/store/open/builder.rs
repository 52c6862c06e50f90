//! The builder of a store, and the groups, tiers and policies that it is given.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, Durability, Requirement};
use terrane_layout::{BlockFingerprint, Geometry, LayoutBuilder, LayoutError, PhysicalLayout};
use terrane_storage::{IoBackend, SystemAllocator, SystemOptions};
use terrane_transfer::{Endpoint, TransferManager};

use crate::disk::Namespace;
use crate::slab::SlabOptions;

/// The blocks of one kind of cache: all have one shape, or are opaque bytes of one length.
///
/// Hybrid models have several: full attention, a state, an indexer.
#[derive(Clone, Debug)]
#[must_use = "a group does nothing until a builder has it"]
pub struct BlockGroup {
    pub(crate) name: String,
    pub(crate) block_bytes: u64,
    /// `None` for opaque blocks.
    pub(crate) geometry: Option<Geometry>,
    pub(crate) weight: u32,
}

impl BlockGroup {
    /// Blocks of up to `block_bytes` bytes that the store does not interpret.
    pub fn new(name: impl Into<String>, block_bytes: u32) -> Self {
        Self { name: name.into(), block_bytes: block_bytes.into(), geometry: None, weight: 1 }
    }

    /// Blocks of the shape of a layout. The number of the layout's blocks does not matter.
    pub fn of_layout(name: impl Into<String>, layout: &PhysicalLayout) -> Self {
        Self::of_geometry(name, layout.geometry())
    }

    /// Blocks of the shape of a geometry. The number of its blocks does not matter.
    pub fn of_geometry(name: impl Into<String>, geometry: &Geometry) -> Self {
        let is_opaque = geometry
            .sections()
            .iter()
            .any(|section| section.name() == terrane_layout::SectionName::OPAQUE);
        Self {
            name: name.into(),
            block_bytes: geometry.block_bytes().get(),
            geometry: (!is_opaque).then(|| geometry.clone()),
            weight: 1,
        }
    }

    /// The group's share of the bytes of each tier is its weight divided by the sum of all weights. Each
    /// weight is 1 by default, which gives equal shares. With the bytes of a block as weights, all groups
    /// have equally many slots.
    pub fn weight(self, weight: u32) -> Self {
        Self { weight, ..self }
    }

    /// The fingerprint that the disk tier records: the shape, or the length of opaque blocks.
    pub(crate) fn fingerprint(&self, group: u32) -> [u8; 16] {
        match &self.geometry {
            Some(geometry) => {
                BlockFingerprint::new(geometry, group, self.name.as_bytes()).to_u128().to_le_bytes()
            }
            None => {
                let bytes = self.block_bytes.to_le_bytes();
                let sum = terrane_core::checksum::crc64(self.name.as_bytes()).to_le_bytes();
                let mut fingerprint = [0; 16];
                fingerprint
                    .iter_mut()
                    .zip(bytes.iter().chain(&sum))
                    .for_each(|(to, from)| *to = *from);
                fingerprint
            }
        }
    }
}

/// A tier of memory: one endpoint for each group, in the order of the groups. The store owns their
/// block ids.
#[derive(Clone, Debug)]
#[must_use = "a tier does nothing until a builder has it"]
pub struct MemoryTier {
    pub(crate) name: String,
    pub(crate) memory: TierMemory,
}

#[derive(Clone)]
pub(crate) enum TierMemory {
    Endpoints(Vec<Endpoint>),
    /// Memory that the store allocates, in shares by the groups' weights.
    Allocated(ByteCount, Arc<AllocateLayout>),
}

/// Allocates the memory of a geometry.
pub(crate) type AllocateLayout =
    dyn Fn(Geometry) -> Result<PhysicalLayout, LayoutError> + Send + Sync;

impl fmt::Debug for TierMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Endpoints(endpoints) => f.debug_tuple("Endpoints").field(endpoints).finish(),
            Self::Allocated(bytes, _) => f.debug_tuple("Allocated").field(bytes).finish(),
        }
    }
}

impl MemoryTier {
    /// A tier in memory of the caller: device, pinned or system memory.
    pub fn new(name: impl Into<String>, endpoints: impl IntoIterator<Item = Endpoint>) -> Self {
        let endpoints = endpoints.into_iter().collect();
        Self { name: name.into(), memory: TierMemory::Endpoints(endpoints) }
    }

    /// A tier of system memory that the store allocates, shared by [weight](BlockGroup::weight).
    pub fn system(name: impl Into<String>, bytes: ByteCount) -> Self {
        Self::allocated(name, bytes, SystemAllocator::new(SystemOptions::default()))
    }

    /// A tier of memory that the store takes from `allocator`, such as pinned memory. The groups share it
    /// by [weight](BlockGroup::weight).
    pub fn allocated<A>(name: impl Into<String>, bytes: ByteCount, allocator: A) -> Self
    where
        A: Allocate + Send + Sync + 'static,
    {
        let allocate = move |geometry| {
            let layout = LayoutBuilder::from_geometry(geometry).allocate(&allocator);
            layout.unregistered().build()
        };
        Self { name: name.into(), memory: TierMemory::Allocated(bytes, Arc::new(allocate)) }
    }
}

/// The disk tier: its directories and its capacity.
#[derive(Clone, Debug)]
#[must_use = "a tier does nothing until a builder has it"]
pub struct DiskTier {
    pub(crate) directories: Vec<PathBuf>,
    pub(crate) bytes: ByteCount,
    pub(crate) slabs: SlabOptions,
}

impl DiskTier {
    /// A tier of this many bytes in a directory that exists. The groups share it by
    /// [weight](BlockGroup::weight).
    ///
    /// The store creates a folder with the name of its namespace there.
    pub fn new(directory: impl AsRef<Path>, bytes: ByteCount) -> Self {
        Self {
            directories: vec![directory.as_ref().to_owned()],
            bytes,
            slabs: SlabOptions::default(),
        }
    }

    /// Puts a part of the slots in another directory, such as one on another drive. Slots alternate
    /// between all directories. The catalog is in the first one. The store locks its folder in each.
    ///
    /// The store records its directories. Later openings pass the same ones in the same order. If a drive
    /// is lost, so are all blocks: remove the store's folder in each other directory, and open it again.
    pub fn also_in(mut self, directory: impl AsRef<Path>) -> Self {
        self.directories.push(directory.as_ref().to_owned());
        self
    }

    /// Sets how a block is made durable; [`Durability::Data`] by default.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.slabs.disk.durability = durability;
        self
    }

    /// The most requests in flight; 32 by default.
    pub fn io_depth(mut self, io_depth: u32) -> Self {
        self.slabs.depth = io_depth;
        self
    }

    /// Whether the tier refuses puts and removals. Its blocks can still be read. Off by default.
    pub fn read_only(mut self, read_only: bool) -> Self {
        self.slabs.read_only = read_only;
        self
    }

    /// Whether reads and writes bypass the page cache; preferred by default.
    pub fn direct_io(mut self, direct: Requirement) -> Self {
        self.slabs.disk.direct = direct;
        self
    }

    /// Whether the files reserve their disk space when they are created or extended; preferred by
    /// default.
    pub fn preallocate(mut self, preallocate: Requirement) -> Self {
        self.slabs.disk.preallocate = preallocate;
        self
    }

    /// io_uring or threads; whichever is available by default.
    pub fn backend(mut self, backend: IoBackend) -> Self {
        self.slabs.backend = backend;
        self
    }

    /// The most bytes of the callers' memory that are registered with io_uring, and thereby pinned; 4 GiB
    /// by default. See [`IoQueueOptions::registered`](terrane_storage::IoQueueOptions::registered).
    pub fn registered(mut self, registered: ByteCount) -> Self {
        self.slabs.registered = registered;
        self
    }
}

/// When a block that is put is written to slower tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WritePolicy {
    /// With the put. It ends when the slowest tier has the block.
    #[default]
    Through,
    /// Before the block is evicted, once half of the tier is dirty, by a sync, and in a close. The
    /// put ends when the fastest tier has the block.
    Back,
    /// When the block was used so many times, by a sync, and in a close; with the put for 0. Blocks
    /// that are evicted before are lost.
    AfterUses(u8),
}

/// How a tier chooses the block that makes room.
///
/// In each tier, each group has slots, an index and a policy of its own. The groups share the bytes of a
/// tier by [weight](BlockGroup::weight), unless the tier has endpoints of the caller. A block of one group never displaces
/// a block of another group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EvictionKind {
    /// [`S3Fifo`](crate::S3Fifo): scans do not empty the tier.
    #[default]
    S3Fifo,
    /// [`Lru`](crate::Lru): least recently used.
    Lru,
}

/// The result of opening a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recovery {
    /// The blocks that were found on disk. Their bytes are verified when they are read.
    pub found: u64,
    /// Records that a crash cut short or lost before they were durable.
    pub torn: u64,
    /// Records that were durable and are damaged or missing.
    pub damaged: u64,
    /// Blocks that are not used: a removal of their keys may be among the damaged records, or their
    /// slots no longer exist.
    pub dropped: u64,
    /// Whether one of the superblocks was written again.
    pub superblock_repaired: bool,
    /// The bytes of metadata that were read.
    pub bytes: ByteCount,
    /// The time that the opening took.
    pub took: Duration,
}

/// Builds a [`Store`](crate::Store).
#[must_use = "a builder does nothing until `open`"]
pub struct StoreBuilder {
    pub(crate) groups: Vec<BlockGroup>,
    pub(crate) memory_tiers: Vec<MemoryTier>,
    pub(crate) disk: Option<DiskTier>,
    pub(crate) namespace: Option<Namespace>,
    pub(crate) manager: Option<TransferManager>,
    pub(crate) write_policy: WritePolicy,
    pub(crate) eviction: EvictionKind,
    pub(crate) keep_keys: bool,
    pub(crate) max_writes_while_reads_wait: usize,
    pub(crate) persistent: bool,
    pub(crate) close_within: Duration,
}

terrane_core::debug_fields!(StoreBuilder, |it| { groups: it.groups.len(), memory_tiers: it.memory_tiers.len(), disk: it.disk });

impl StoreBuilder {
    pub(crate) const fn new() -> Self {
        Self {
            groups: Vec::new(),
            memory_tiers: Vec::new(),
            disk: None,
            namespace: None,
            manager: None,
            write_policy: WritePolicy::Through,
            eviction: EvictionKind::S3Fifo,
            keep_keys: false,
            max_writes_while_reads_wait: 2,
            persistent: true,
            close_within: Duration::from_secs(10),
        }
    }

    /// Adds a group of blocks. The first one is group 0.
    pub fn group(mut self, group: BlockGroup) -> Self {
        self.groups.push(group);
        self
    }

    /// Adds a tier of system memory that the store allocates, with the name `host`.
    pub fn host(self, bytes: ByteCount) -> Self {
        self.memory_tier(MemoryTier::system("host", bytes))
    }

    /// Adds a memory tier. The fastest one is added first.
    pub fn memory_tier(mut self, tier: MemoryTier) -> Self {
        self.memory_tiers.push(tier);
        self
    }

    /// Sets the disk tier, which is the slowest one.
    pub fn disk(self, disk: DiskTier) -> Self {
        Self { disk: Some(disk), ..self }
    }

    /// Sets the namespace of the keys. A disk tier needs it.
    pub fn namespace(self, namespace: Namespace) -> Self {
        Self { namespace: Some(namespace), ..self }
    }

    /// Sets the manager that copies between endpoints. Without it the store uses the default engines,
    /// which cannot reach devices. The store copies up to 256 KiB of host memory for a job itself.
    pub fn manager(self, manager: &TransferManager) -> Self {
        Self { manager: Some(manager.clone()), ..self }
    }

    /// Sets when blocks are written to slower tiers; [`WritePolicy::Through`] by default.
    pub fn write_policy(self, write_policy: WritePolicy) -> Self {
        Self { write_policy, ..self }
    }

    /// Sets how blocks are chosen that make room; [`EvictionKind::S3Fifo`] by default.
    pub fn eviction(self, eviction: EvictionKind) -> Self {
        Self { eviction, ..self }
    }

    /// Keeps the keys in memory, for events, reports and checkpoints; off by default. Without it, a
    /// checkpoint replaces the keys on disk by their hashes, so tools list these.
    pub fn keep_keys(self, keep_keys: bool) -> Self {
        Self { keep_keys, ..self }
    }

    /// The maximum number of disk writes in flight while reads wait; 2 by default.
    pub fn max_writes_while_reads_wait(self, max_writes_while_reads_wait: usize) -> Self {
        Self { max_writes_while_reads_wait, ..self }
    }

    /// Whether blocks of an earlier session are used; on by default. Otherwise the store is cleared
    /// when it is opened.
    pub fn persistent(self, persistent: bool) -> Self {
        Self { persistent, ..self }
    }

    /// The time that a drop of the store waits for its jobs; 10 seconds by default.
    pub fn close_within(self, close_within: Duration) -> Self {
        Self { close_within, ..self }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A builder of a store of 16 blocks of 4 KiB on disk.
    pub(crate) fn of_16_blocks(directory: &Path) -> StoreBuilder {
        StoreBuilder::new()
            .group(BlockGroup::new("kv", 4096))
            .disk(DiskTier::new(directory, ByteCount::kib(64)))
            .namespace(Namespace::new("model", [("model", "llama")]).unwrap())
    }
}
