//! An upstream for benchmarks: addresses without memory, and calls that take a stated time.

use std::hint;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use terrane_core::{
    Allocate, AllocateError, ByteCount, DeviceAddress, DeviceId, Limits, Location, Memory,
    RegionRequest, StorageKind,
};

/// No driver uses device numbers this high.
const DEVICE: DeviceId = DeviceId::new(0xFFFF_1000);

/// The time of a pair of `cuMemAllocAsync` and `cuMemFreeAsync` on an H200.
pub const DRIVER: Duration = Duration::from_nanos(660);

/// A device of a given capacity. An allocation and a free each take half of a given time.
#[derive(Debug)]
pub struct PricedDevice {
    state: Arc<State>,
    next: AtomicU64,
}

#[derive(Debug)]
struct State {
    half: Duration,
    capacity: u64,
    live: AtomicU64,
    calls: AtomicU64,
}

/// A span of a [`PricedDevice`].
#[derive(Debug)]
pub struct PricedRegion {
    address: u64,
    length: u64,
    state: Arc<State>,
}

impl PricedDevice {
    /// Creates a device without a limit, whose allocation and free take `pair` together.
    #[must_use]
    pub fn new(pair: Duration) -> Self {
        Self::with_capacity(pair, u64::MAX)
    }

    /// Like [`new`](Self::new), with `capacity` bytes.
    #[must_use]
    pub fn with_capacity(pair: Duration, capacity: u64) -> Self {
        let state =
            State { half: pair / 2, capacity, live: AtomicU64::new(0), calls: AtomicU64::new(0) };
        Self { state: Arc::new(state), next: AtomicU64::new(1 << 60) }
    }

    /// The bytes that are allocated now.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.state.live.load(Ordering::Relaxed)
    }

    /// The number of allocations and frees.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.state.calls.load(Ordering::Relaxed)
    }

    /// Allocates a region of `bytes`, unless the capacity is exhausted.
    #[must_use]
    pub fn region(&self, bytes: u64) -> Option<PricedRegion> {
        self.state.spend();
        let add = |live: u64| live.checked_add(bytes).filter(|&sum| sum <= self.state.capacity);
        self.state.live.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        let address = self.next.fetch_add(bytes.next_multiple_of(512), Ordering::Relaxed);
        Some(PricedRegion { address, length: bytes, state: Arc::clone(&self.state) })
    }
}

impl State {
    /// Takes half of the time of a pair.
    fn spend(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if !self.half.is_zero() {
            let started = Instant::now();
            while started.elapsed() < self.half {
                hint::spin_loop();
            }
        }
    }
}

// SAFETY: no address is returned twice, and there is no memory at them.
unsafe impl Allocate for PricedDevice {
    type Memory = PricedRegion;

    fn kind(&self) -> StorageKind {
        StorageKind::Device(DEVICE)
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn allocate(&self, request: &RegionRequest) -> Result<PricedRegion, AllocateError> {
        self.region(request.bytes.get()).ok_or_else(|| AllocateError::OutOfMemory {
            kind: self.kind(),
            requested: request.bytes,
            available: Some(ByteCount::new(self.state.capacity.saturating_sub(self.live()))),
            label: request.label.clone(),
            source: None,
        })
    }
}

// SAFETY: the span belongs to a device that does not exist, and has no bytes.
unsafe impl Memory for PricedRegion {
    fn kind(&self) -> StorageKind {
        StorageKind::Device(DEVICE)
    }

    fn location(&self) -> Location {
        Location::Device { device: DEVICE, address: DeviceAddress::new(self.address) }
    }

    fn length(&self) -> ByteCount {
        ByteCount::new(self.length)
    }
}

impl Drop for PricedRegion {
    fn drop(&mut self) {
        self.state.spend();
        self.state.live.fetch_sub(self.length, Ordering::Relaxed);
    }
}
