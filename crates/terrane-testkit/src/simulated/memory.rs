//! An upstream of addresses without memory.

use std::sync::{Arc, Mutex};

use terrane_core::{
    Allocate, AllocateError, ByteCount, DeviceAddress, DeviceId, Limits, Location, Memory,
    RegionRequest, SizeOverflow, StorageKind,
};

use super::address_space::{AddressSpace, Reuse};
use terrane_core::sync::lock;

/// Memory of a simulated device: addresses, with a capacity and an address space, but without
/// bytes.
///
/// A pool, an adaptor or a recorded trace can use it like a device of any size. No driver uses the
/// device's ordinal, and no device has its addresses. So code that copies refuses this memory.
///
/// Memory that is still live after all owners should have dropped it is a leak: see
/// [`usage`](Self::usage).
#[derive(Debug)]
pub struct Simulated {
    device: DeviceId,
    limits: Limits,
    state: Arc<Mutex<State>>,
}

/// The options of a [`Simulated`] device.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedOptions {
    /// The capacity in bytes. The default is 2^48.
    pub capacity: ByteCount,
    /// The limits on requests.
    pub limits: Limits,
    /// Whether addresses are reused, and how.
    pub reuse: Reuse,
    /// A number that distinguishes simulated devices.
    pub device: u16,
}

impl Default for SimulatedOptions {
    fn default() -> Self {
        Self {
            capacity: ByteCount::new(1 << 48),
            limits: Limits::NONE,
            reuse: Reuse::Never,
            device: 0,
        }
    }
}

/// The usage of a [`Simulated`] device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimulatedUsage {
    /// Bytes that are live.
    pub live_bytes: ByteCount,
    /// Blocks that are live.
    pub live_blocks: u64,
    /// The maximum number of bytes that were live at once.
    pub peak_bytes: ByteCount,
    /// The total number of allocated blocks.
    pub allocations: u64,
    /// The number of refused requests.
    pub failures: u64,
}

#[derive(Debug)]
struct State {
    capacity: ByteCount,
    space: AddressSpace,
    usage: SimulatedUsage,
}

/// No driver uses device numbers this high.
const FIRST_SIMULATED_DEVICE: u32 = 0xFFFF_0000;

impl Simulated {
    /// Creates a device with `options`.
    #[must_use]
    pub fn new(options: SimulatedOptions) -> Self {
        let SimulatedOptions { capacity, limits, reuse, device } = options;
        let space = AddressSpace::new(reuse, capacity);
        let usage = SimulatedUsage::default();
        Self {
            device: DeviceId::new(FIRST_SIMULATED_DEVICE + u32::from(device)),
            limits,
            state: Arc::new(Mutex::new(State { capacity, space, usage })),
        }
    }

    /// Returns the usage.
    #[must_use]
    pub fn usage(&self) -> SimulatedUsage {
        lock(&self.state).usage
    }

    fn try_allocate(&self, request: &RegionRequest) -> Result<SimulatedMemory, AllocateError> {
        let (kind, label) = (self.kind(), &request.label);
        let length = request
            .bytes
            .align_up(self.limits.granule)
            .map_err(|overflow| AllocateError::backend(kind, request, overflow))?;
        if let Some(largest) = self.limits.largest_region.filter(|&largest| length > largest) {
            let (requested, label) = (request.bytes, label.clone());
            return Err(AllocateError::TooLarge { kind, requested, largest, label });
        }
        let alignment = self.limits.alignment.max(request.alignment);
        let out_of_memory = |available| AllocateError::OutOfMemory {
            kind,
            requested: length,
            available: Some(available),
            label: label.clone(),
            source: None,
        };
        let address = if length.is_zero() {
            alignment.get()
        } else {
            let mut state = lock(&self.state);
            let available = state.available();
            if length > available {
                return Err(out_of_memory(available));
            }
            let Some(address) = state.space.take(length.get(), alignment) else {
                return Err(out_of_memory(state.space.largest(available)));
            };
            state
                .enter(length)
                .map_err(|overflow| AllocateError::backend(kind, request, overflow))?;
            address
        };
        let state = (!length.is_zero()).then(|| Arc::clone(&self.state));
        Ok(SimulatedMemory { device: self.device, address, length, state })
    }
}

// SAFETY: addresses of live memory do not overlap, and there are no bytes at them.
unsafe impl Allocate for Simulated {
    type Memory = SimulatedMemory;

    fn kind(&self) -> StorageKind {
        StorageKind::Device(self.device)
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn allocate(&self, request: &RegionRequest) -> Result<SimulatedMemory, AllocateError> {
        self.try_allocate(request).inspect_err(|_| lock(&self.state).usage.failures += 1)
    }
}

impl State {
    fn available(&self) -> ByteCount {
        self.capacity.checked_sub(self.usage.live_bytes).unwrap_or(ByteCount::ZERO)
    }

    fn enter(&mut self, length: ByteCount) -> Result<(), SizeOverflow> {
        let usage = &mut self.usage;
        usage.live_bytes = usage.live_bytes.checked_add(length)?;
        usage.peak_bytes = usage.peak_bytes.max(usage.live_bytes);
        usage.live_blocks += 1;
        usage.allocations += 1;
        Ok(())
    }

    fn leave(&mut self, address: u64, length: ByteCount) {
        self.space.give_back(address, length.get());
        let live = self.usage.live_bytes.checked_sub(length);
        debug_assert!(live.is_some(), "more bytes were freed than allocated");
        self.usage.live_bytes = live.unwrap_or(ByteCount::ZERO);
        self.usage.live_blocks -= 1;
    }
}

/// A span of a [`Simulated`] device.
#[derive(Debug)]
pub struct SimulatedMemory {
    device: DeviceId,
    address: u64,
    length: ByteCount,
    /// The device's state, in which the span is freed; `None` for a span of no bytes.
    state: Option<Arc<Mutex<State>>>,
}

// SAFETY: the span belongs to a live allocation of the simulated device, which is the only device
// with its ordinal. There are no bytes at it, so no access reaches any.
unsafe impl Memory for SimulatedMemory {
    fn kind(&self) -> StorageKind {
        StorageKind::Device(self.device)
    }

    fn location(&self) -> Location {
        Location::Device { device: self.device, address: DeviceAddress::new(self.address) }
    }

    fn length(&self) -> ByteCount {
        self.length
    }
}

impl Drop for SimulatedMemory {
    fn drop(&mut self) {
        if let Some(state) = &self.state {
            lock(state).leave(self.address, self.length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::Alignment;

    fn request(bytes: u64) -> RegionRequest {
        RegionRequest::new(ByteCount::new(bytes))
    }

    fn address(memory: &SimulatedMemory) -> u64 {
        match memory.location() {
            Location::Device { address, .. } => address.get(),
            other => panic!("{other} is not on a device"),
        }
    }

    #[test]
    fn fragmentation_refuses_requests_below_the_capacity() {
        let capacity = ByteCount::new(30);
        let reuse = Reuse::FirstFit;
        let options = SimulatedOptions { capacity, reuse, ..SimulatedOptions::default() };
        let device = Simulated::new(options);
        let [a, b, c] = [(); 3].map(|()| device.allocate(&request(10)).unwrap());
        let (first, _) = (address(&a), drop((a, c)));
        let error = device.allocate(&request(20)).unwrap_err();
        assert!(
            matches!(error, AllocateError::OutOfMemory { available: Some(largest), .. }
                if largest == ByteCount::new(10)),
            "{error}"
        );
        assert_eq!(address(&device.allocate(&request(5)).unwrap()), first);
        drop(b);
        assert_eq!(address(&device.allocate(&request(30)).unwrap()), first);
        let usage = device.usage();
        assert_eq!((usage.live_blocks, usage.allocations, usage.failures), (0, 5, 1));
    }

    #[test]
    fn only_the_capacity_limits_devices_that_reuse_no_addresses() {
        let capacity = ByteCount::new(30);
        let device = Simulated::new(SimulatedOptions { capacity, ..SimulatedOptions::default() });
        for _ in 0..10 {
            drop(device.allocate(&request(30)).unwrap());
        }
        let held = device.allocate(&request(20)).unwrap();
        assert!(device.allocate(&request(11)).is_err());
        assert_eq!(device.usage().live_bytes, held.length());
    }

    #[test]
    fn alignment_and_granule_are_kept() {
        let limits = Limits { granule: Alignment::SECTOR, ..Limits::NONE };
        let device = Simulated::new(SimulatedOptions { limits, ..SimulatedOptions::default() });
        let odd = device.allocate(&request(1)).unwrap();
        let page = device.allocate(&request(1).aligned_to(Alignment::PAGE)).unwrap();
        assert_eq!(odd.length(), ByteCount::new(512));
        assert!(page.location().alignment() >= Alignment::PAGE);
    }
}
