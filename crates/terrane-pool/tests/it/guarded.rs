//! Guard and poison over real memory.

use std::sync::{Arc, OnceLock};

use terrane_core::{
    Alignment, Allocate, BoxedCause, ByteCount, Limits, Location, Memory, RegionRequest,
};
use terrane_pool::adaptors::{
    Fill, FillHost, Guard, GuardLog, GuardViolation, OverwrittenSide, Poison,
};
use terrane_pool::{Pool, PoolOptions, StreamId};
use terrane_testkit::memory::HeapAllocator;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, with_default};
use tracing::{Event, Metadata, Subscriber};

use crate::heap::Heap;

fn heap() -> Heap {
    Heap::new(ByteCount::mib(1))
}

fn address(memory: &impl Memory) -> *mut u8 {
    let Location::Host(address) = memory.location() else {
        panic!("{} is not the host's", memory.location())
    };
    address.as_ptr()
}

#[test]
fn writes_out_of_bounds_are_found_on_both_sides_with_their_distance() {
    let guard = Guard::new(heap());
    let request = RegionRequest::new(ByteCount::new(64)).labelled("kv");
    let block = guard.allocate(&request).unwrap();
    assert_eq!(guard.verify(), 0);

    // SAFETY: within the memory that the guard obtained, around the block.
    unsafe { address(&block).wrapping_add(64).write(0) };
    assert_eq!(guard.verify(), 1);
    // SAFETY: as above.
    unsafe { address(&block).wrapping_sub(9).write(0) };
    drop(block);
    let found: Vec<_> = guard
        .log()
        .violations()
        .into_iter()
        .map(|violation| match violation {
            GuardViolation::Overwritten { label, side, distance, .. } => {
                assert_eq!(label.as_str(), "kv");
                (side, distance)
            }
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(
        found,
        [(OverwrittenSide::After, 0), (OverwrittenSide::Before, 8), (OverwrittenSide::After, 0)]
    );
}

/// Every length within a granule, over an upstream that rounds up to the granule.
#[test]
fn the_first_byte_after_the_request_is_guarded() {
    for granule in [Alignment::BYTE, Alignment::SECTOR, Alignment::PAGE] {
        let limits = Limits { granule, ..Limits::NONE };
        for upstream in [HeapAllocator::system(), HeapAllocator::pinned()] {
            let upstream = upstream.with_limits(limits);
            let guard = Guard::new(Pool::new(&upstream, PoolOptions::default()).unwrap());
            let direct = Guard::new(&upstream);
            for bytes in [1, 63, 64, 65, 511, 1000, 4095, 4096, 4097] {
                let request = RegionRequest::new(ByteCount::new(bytes)).labelled("kv");
                overrun_is_found(&guard, &request);
                overrun_is_found(&direct, &request);
            }
        }
    }
}

fn overrun_is_found<A: Allocate>(guard: &Guard<A>, request: &RegionRequest) {
    let before = guard.log().found();
    let block = guard.allocate(request).unwrap();
    assert_eq!(block.length(), request.bytes);
    // SAFETY: the whole of the block, which this test owns.
    unsafe { address(&block).write_bytes(0, block.length().to_usize()) };
    assert_eq!(guard.verify(), 0, "within bounds: {request:?}");
    // SAFETY: within the memory that the guard obtained, after the block.
    unsafe { address(&block).wrapping_add(request.bytes.to_usize()).write(0) };
    drop(block);
    assert_eq!(guard.log().found(), before + 1, "{request:?}");
    let violations = guard.log().violations();
    let Some(GuardViolation::Overwritten { side, distance, .. }) = violations.last() else {
        panic!("{violations:?}");
    };
    assert_eq!((*side, *distance), (OverwrittenSide::After, 0), "{request:?}");
}

/// Accesses host memory, and queries the guard's log in between, as a subscriber of traces may do.
#[derive(Clone, Debug, Default)]
struct Curious {
    log: Arc<OnceLock<GuardLog>>,
}

impl Curious {
    fn ask(&self) {
        if let Some(log) = self.log.get() {
            let _ = (log.live(), log.found(), log.violations());
        }
    }
}

impl Fill for Curious {
    unsafe fn fill(
        &self,
        memory: &dyn Memory,
        byte: u8,
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        // SAFETY: the caller's promise.
        unsafe { FillHost.fill(memory, byte, stream) }
    }

    unsafe fn write(&self, at: Location, bytes: &[u8], stream: StreamId) -> Result<(), BoxedCause> {
        self.ask();
        // SAFETY: the caller's promise.
        unsafe { FillHost.write(at, bytes, stream) }
    }

    unsafe fn read(
        &self,
        at: Location,
        into: &mut [u8],
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        self.ask();
        // SAFETY: the caller's promise.
        unsafe { FillHost.read(at, into, stream) }
    }
}

#[test]
fn a_fill_may_call_the_guard() {
    let fill = Curious::default();
    let guard = Guard::ordered(heap(), fill.clone(), StreamId::new(0));
    fill.log.set(guard.log().clone()).unwrap();
    let request = RegionRequest::new(ByteCount::new(64));
    let blocks = [(); 2].map(|()| guard.allocate(&request).unwrap());
    assert_eq!(guard.verify(), 0);
    // SAFETY: within the memory that the guard obtained, after the block.
    unsafe { address(&blocks[0]).wrapping_add(64).write(0) };
    assert_eq!(guard.verify(), 1);
    drop(blocks);
    assert_eq!((guard.log().live(), guard.log().found()), (0, 2));
}

/// Queries the guard's log at each event.
struct Subscribed(GuardLog);

impl Subscriber for Subscribed {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        let _ = (self.0.live(), self.0.found(), self.0.violations());
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn a_subscriber_of_traces_may_ask_the_guard() {
    let guard = Guard::new(heap());
    with_default(Subscribed(guard.log().clone()), || {
        let block = guard.allocate(&RegionRequest::new(ByteCount::new(64))).unwrap();
        // SAFETY: within the memory that the guard obtained, after the block.
        unsafe { address(&block).wrapping_add(64).write(0) };
        assert_eq!(guard.verify(), 1);
        drop(block);
    });
    assert_eq!(guard.log().found(), 2);
}

#[test]
fn writes_within_bounds_are_not_found() {
    let guard = Guard::new(heap());
    for bytes in [8, 64, 4096, 5000] {
        let block = guard.allocate(&RegionRequest::new(ByteCount::new(bytes))).unwrap();
        // SAFETY: the whole of the block, which this test owns.
        unsafe { address(&block).write_bytes(0, block.length().to_usize()) };
    }
    assert_eq!(guard.log().found(), 0);
}

#[test]
fn memory_is_poisoned_when_new_and_when_freed() {
    let heap = heap();
    // The delayed upstream keeps the memory long enough to check the poison bytes.
    let delayed = terrane_testkit::delayed::Delayed::new(heap.clone(), 1);
    let poison = Poison::on_host(&delayed);
    let block = poison.allocate(&RegionRequest::new(ByteCount::new(16))).unwrap();
    let pointer = address(&block);
    // SAFETY: the block is live, and initialised.
    assert_eq!(unsafe { pointer.cast::<[u8; 16]>().read() }, [0xFF; 16]);
    drop(block);
    // SAFETY: the delayed upstream has not freed the block yet.
    assert_eq!(unsafe { pointer.cast::<[u8; 16]>().read() }, [0xDE; 16]);
    assert_eq!((poison.report().filled, poison.report().failed), (2, 0));
    drop(poison);
    drop(delayed);
    assert_eq!(heap.live_blocks(), 0);
}
