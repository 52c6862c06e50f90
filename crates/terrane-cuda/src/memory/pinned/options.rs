//! How pinned memory is to be brought up.

use terrane_core::{ByteCount, Wish};
use terrane_storage::{NumaPolicy, SystemOptions};

/// How pinned memory is to be brought up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedOptions {
    /// The pages, and who touches them first. What it says of NUMA nodes counts only where
    /// [`numa`](Self::numa) leaves it to it.
    pub system: SystemOptions,
    /// On which NUMA nodes.
    pub numa: PinnedNuma,
    /// Whether the memory is mapped here and registered with the driver, which is several times as
    /// fast as the driver's own `cuMemHostAlloc`. Where it is not wished for, or preferred and
    /// refused, the driver allocates, which heeds neither nodes nor huge pages: the report says so,
    /// and what is required of them is an error.
    pub registration: Wish,
    /// The most bytes that are registered in one go, 64 GiB at most.
    pub largest_registration: ByteCount,
    /// What no registration splits of memory whose [request](terrane_core::RegionRequest::unit)
    /// names no unit, or one that fits no registration: the stride of a block or of a region
    /// within the allocation, counted from its beginning. Layouts and pools name theirs.
    ///
    /// A copy must not cross from one registration into the next. The engine makes none that
    /// does: a block that is split costs it one copy more, and its bytes are right.
    pub unit: ByteCount,
    /// How much [`bring_up_in_background`](super::PinnedAllocator::bring_up_in_background) touches
    /// and registers before it says that it is usable: so much has each registration, rounded down
    /// to whole units (those of the request, as for [`unit`](Self::unit)), but one at least.
    pub background_step: ByteCount,
    /// Whether the processor's writes go around its caches and its reads are slow, as only the
    /// driver's own allocation can have it.
    pub is_write_combined: bool,
}

/// 64 GiB.
pub(super) const LARGEST_REGISTRATION: ByteCount = ByteCount::gib(64);

impl Default for PinnedOptions {
    /// Transparent huge pages near the device, touched by all its node's processors, registered
    /// in chunks of at most 64 GiB that split no unit of the request, or no 2 MiB, or in steps of 512 MiB in the background;
    /// cached as other memory is.
    fn default() -> Self {
        Self {
            system: SystemOptions::default(),
            numa: PinnedNuma::NearDevice(Wish::Preferred),
            registration: Wish::Preferred,
            largest_registration: LARGEST_REGISTRATION,
            unit: ByteCount::mib(2),
            background_step: ByteCount::mib(512),
            is_write_combined: false,
        }
    }
}

/// On which NUMA nodes pinned memory is to be.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PinnedNuma {
    /// On the node that the device is attached to.
    NearDevice(Wish),
    /// As the policy says.
    Policy(NumaPolicy),
}
