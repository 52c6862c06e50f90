//! Options of pinned memory.

use terrane_core::{ByteCount, Requirement};
use terrane_storage::{NumaPolicy, SystemOptions};

/// Options of pinned memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedOptions {
    /// The page size, and the threads that touch the pages first. Its NUMA settings apply only if
    /// [`numa`](Self::numa) uses them.
    pub system: SystemOptions,
    /// The NUMA nodes of the memory.
    pub numa: PinnedNuma,
    /// Whether the memory is mapped here and registered with the driver. That is several times as
    /// fast as the driver's own `cuMemHostAlloc`. If registration is off, or preferred but refused,
    /// the driver allocates. The driver then ignores nodes and huge pages. The report states this,
    /// and a required one is an error.
    pub registration: Requirement,
    /// The maximum number of bytes in one registration, at most 64 GiB.
    pub largest_registration: ByteCount,
    /// The unit that no registration splits, for memory whose
    /// [request](terrane_core::RegionRequest::unit) names no unit, or names a unit larger than a
    /// registration. It is the stride of a block or of a region within the allocation, counted from
    /// the allocation's beginning. Layouts and pools name their own unit.
    ///
    /// A copy must not cross from one registration into the next, and the engine submits no such
    /// copy. A split block is copied correctly, with one more copy.
    pub unit: ByteCount,
    /// The number of bytes that
    /// [`allocate_in_background`](super::PinnedAllocator::allocate_in_background) touches and
    /// registers before it reports them as usable. This is also the length of each registration. It
    /// is rounded down to whole units (those of the request, as for [`unit`](Self::unit)), but at
    /// least one.
    pub background_step: ByteCount,
}

/// 64 GiB.
pub(super) const LARGEST_REGISTRATION: ByteCount = ByteCount::gib(64);

impl Default for PinnedOptions {
    /// Transparent huge pages near the device, touched by all processors of its node. They are
    /// registered in chunks of at most 64 GiB, which split no unit of the request (or of 2 MiB).
    /// Background preparation uses steps of 512 MiB.
    fn default() -> Self {
        Self {
            system: SystemOptions::default(),
            numa: PinnedNuma::NearDevice(Requirement::Preferred),
            registration: Requirement::Preferred,
            largest_registration: LARGEST_REGISTRATION,
            unit: ByteCount::mib(2),
            background_step: ByteCount::mib(512),
        }
    }
}

/// The NUMA nodes of pinned memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PinnedNuma {
    /// The node that the device is attached to.
    NearDevice(Requirement),
    /// The nodes that the policy names.
    Policy(NumaPolicy),
}
