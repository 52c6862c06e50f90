//! Simulated devices: address spaces, streams and events without hardware.
//!
//! The addresses are not host addresses and are never reused. Code that confuses the two, or that
//! uses freed memory, finds no memory there.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use terrane_core::sync::lock;
use terrane_core::{Alignment, ByteCount, DeviceAddress, DeviceId, HostAddress};
use terrane_transfer::{DeviceOrder, EventHandle, StreamHandle};

static DEVICES: Mutex<BTreeMap<DeviceId, Space>> = Mutex::new(BTreeMap::new());

/// The address space of one device.
struct Space {
    next: u64,
    /// Allocations, by their start.
    live: BTreeMap<u64, Backing>,
}

struct Backing {
    host: HostAddress,
    bytes: ByteCount,
}

/// The first address of a device. It is above the addresses that x86-64 and aarch64 assign to
/// programs (2^47 and 2^48 bytes), so no device address is a host address.
const BEGIN: u64 = 1 << 52;

/// Maps host bytes into a device's address space. The address is a multiple of `alignment` and of
/// no larger power of two.
pub(crate) fn map(
    device: DeviceId,
    host: HostAddress,
    bytes: ByteCount,
    alignment: Alignment,
) -> DeviceAddress {
    let mut devices = lock(&DEVICES);
    let space =
        devices.entry(device).or_insert_with(|| Space { next: BEGIN, live: BTreeMap::new() });
    let address = space.next.next_multiple_of(2 * alignment.get()) + alignment.get();
    // A gap, so that an access past the end finds no memory.
    space.next = address + bytes.get() + 1;
    space.live.insert(address, Backing { host, bytes });
    DeviceAddress::new(address)
}

pub(crate) fn unmap(device: DeviceId, address: DeviceAddress) {
    let found = lock(&DEVICES).get_mut(&device).and_then(|s| s.live.remove(&address.get()));
    assert!(found.is_some(), "{address:?} of device {device} is freed twice");
}

/// The host bytes of a span of a simulated device; `None` if it is not, or no longer, within one
/// allocation.
#[must_use]
pub fn resolve(device: DeviceId, address: DeviceAddress, bytes: ByteCount) -> Option<*mut u8> {
    let devices = lock(&DEVICES);
    let (begin, backing) = devices.get(&device)?.live.range(..=address.get()).next_back()?;
    let offset = ByteCount::new(address.get() - begin);
    let end = offset.checked_add(bytes).ok()?;
    (end <= backing.bytes).then(|| backing.host.as_ptr().wrapping_add(offset.to_usize()))
}

/// A stream of a simulated device: work that is launched in order, and ends when the test finishes
/// it.
#[derive(Debug)]
pub struct SimulatedStream {
    device: DeviceId,
    handle: u64,
    work: Arc<Mutex<Work>>,
}

/// An event of a simulated device. It is complete when all earlier work on its stream has ended.
#[derive(Debug)]
pub struct SimulatedEvent {
    device: DeviceId,
    handle: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Work {
    launched: u64,
    finished: u64,
}

static WAITABLES: Mutex<Waitables> = Mutex::new(Waitables { next: 1, live: BTreeMap::new() });

struct Waitables {
    next: u64,
    live: BTreeMap<u64, Waitable>,
}

#[derive(Clone)]
enum Waitable {
    Stream(Arc<Mutex<Work>>),
    Event(Arc<Mutex<Work>>, u64),
}

impl Waitables {
    fn insert(&mut self, waitable: Waitable) -> u64 {
        let handle = self.next;
        self.next += 1;
        self.live.insert(handle, waitable);
        handle
    }
}

impl SimulatedStream {
    /// Creates a stream without work.
    #[must_use]
    pub fn new(device: DeviceId) -> Self {
        let work = Arc::<Mutex<Work>>::default();
        let handle = lock(&WAITABLES).insert(Waitable::Stream(Arc::clone(&work)));
        Self { device, handle, work }
    }

    /// Launches a piece of work.
    pub fn launch(&self) {
        lock(&self.work).launched += 1;
    }

    /// Ends the oldest piece of work.
    pub fn finish_one(&self) {
        let mut work = lock(&self.work);
        assert!(work.finished < work.launched, "there is no work to finish");
        work.finished += 1;
    }

    /// Records an event after the work launched so far.
    #[must_use]
    pub fn record(&self) -> SimulatedEvent {
        let after = lock(&self.work).launched;
        let handle = lock(&WAITABLES).insert(Waitable::Event(Arc::clone(&self.work), after));
        SimulatedEvent { device: self.device, handle }
    }

    /// The order of a transfer that runs after this stream's work.
    #[must_use]
    pub fn order(&self) -> DeviceOrder {
        let owner = Arc::new(());
        // SAFETY: simulated engines look handles up and decline unknown ones.
        let handle = unsafe { StreamHandle::from_raw(self.device, self.handle, owner) };
        DeviceOrder::AfterStream(handle)
    }
}

impl SimulatedEvent {
    /// The order of a transfer that runs after this event.
    #[must_use]
    pub fn order(&self) -> DeviceOrder {
        // SAFETY: simulated engines look handles up and decline unknown ones.
        let handle = unsafe { EventHandle::from_raw(self.device, self.handle, Arc::new(())) };
        DeviceOrder::AfterEvent(handle)
    }

    /// The event in the form in which engines return it. It lives with the handle, together with
    /// `stream`.
    pub(crate) fn into_handle(self, stream: Arc<SimulatedStream>) -> EventHandle {
        let (device, handle) = (self.device, self.handle);
        // SAFETY: the owner keeps the event alive.
        unsafe { EventHandle::from_raw(device, handle, Arc::new((self, stream))) }
    }

    /// An order that owns this event.
    pub(crate) fn into_order(self) -> DeviceOrder {
        let (device, handle) = (self.device, self.handle);
        // SAFETY: the owner keeps the event alive.
        let handle = unsafe { EventHandle::from_raw(device, handle, Arc::new(self)) };
        DeviceOrder::AfterEvent(handle)
    }
}

/// An event with the current meaning of an order; `None` if the order has no handle of a simulated
/// device.
pub(crate) fn capture(order: &DeviceOrder) -> Option<SimulatedEvent> {
    let device = order.device()?;
    let (work, after) = Gate::of(Some(order))?.0?;
    let handle = lock(&WAITABLES).insert(Waitable::Event(work, after));
    Some(SimulatedEvent { device, handle })
}

/// Whether a simulated event is complete; `None` if it does not exist any more.
#[must_use]
pub fn has_happened(event: &EventHandle) -> Option<bool> {
    Gate::of(Some(&DeviceOrder::AfterEvent(event.clone()))).map(|gate| gate.is_open())
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        lock(&WAITABLES).live.remove(&self.handle);
    }
}

impl Drop for SimulatedEvent {
    fn drop(&mut self) {
        lock(&WAITABLES).live.remove(&self.handle);
    }
}

/// The event of its device that a job waits for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Option<(Arc<Mutex<Work>>, u64)>);

impl Gate {
    /// Returns the gate of an order; `None` if its handle is not a simulated device's.
    pub(crate) fn of(order: Option<&DeviceOrder>) -> Option<Self> {
        let handle = match order {
            None | Some(DeviceOrder::AlreadySynchronised) => return Some(Self(None)),
            Some(DeviceOrder::AfterStream(stream)) => stream.raw(),
            Some(DeviceOrder::AfterEvent(event)) => event.raw(),
            Some(_) => return None,
        };
        let waitable = lock(&WAITABLES).live.get(&handle).cloned()?;
        Some(Self(Some(match waitable {
            Waitable::Stream(work) => {
                let after = lock(&work).launched;
                (work, after)
            }
            Waitable::Event(work, after) => (work, after),
        })))
    }

    pub(crate) fn is_open(&self) -> bool {
        self.0.as_ref().is_none_or(|(work, after)| lock(work).finished >= *after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_completes_only_after_the_work_before_it() {
        let stream = SimulatedStream::new(DeviceId::new(0));
        stream.launch();
        let event = stream.record();
        stream.launch();
        let (event, all) = (Gate::of(Some(&event.order())), Gate::of(Some(&stream.order())));
        let (event, all) = (event.expect("known"), all.expect("known"));
        assert!(!event.is_open() && !all.is_open());
        stream.finish_one();
        assert!(event.is_open() && !all.is_open());
        stream.finish_one();
        assert!(all.is_open());
    }

    #[test]
    fn a_dropped_stream_is_unknown() {
        let order = SimulatedStream::new(DeviceId::new(0)).order();
        assert!(Gate::of(Some(&order)).is_none());
    }
}
