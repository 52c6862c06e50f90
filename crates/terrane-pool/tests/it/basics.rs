//! One thread, one pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, DeviceAddress, DeviceId, ForeignMemory, Limits,
    Location, Memory as _, RegionRequest, Span, StorageKind, delegate_allocate,
};
use terrane_pool::{Pool, PoolError, PoolOptions, SizeClasses, Tag};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::simulated::{Simulated, SimulatedOptions};

use crate::support::{Counted, address};

fn powers_of_two() -> PoolOptions {
    PoolOptions { classes: SizeClasses::PowerOfTwo, ..PoolOptions::default() }
}

#[test]
fn a_released_block_is_the_next_one_acquired() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), powers_of_two()).unwrap();
    let block = pool.allocate_bytes(ByteCount::new(5000)).unwrap();
    assert_eq!(block.granted().get(), 8192);
    assert_eq!(block.length(), block.granted());
    let first = address(&block);
    drop(block);
    let block = pool.allocate_bytes(ByteCount::new(8000)).unwrap();
    assert_eq!(address(&block), first);
    assert_eq!(upstream.allocations(), 1);
    let seen = pool.snapshot();
    assert_eq!((seen.live.get(), seen.cached.get(), seen.held.get()), (8192, 0, 8192));
    drop(pool);
    drop(block);
    upstream.assert_empty();
}

/// The kind and the capabilities are those of the upstream.
#[test]
fn pinned_memory_is_pooled_by_the_same_code() {
    let upstream = HeapAllocator::pinned();
    let pool = Pool::new(&upstream, powers_of_two()).unwrap();
    let block = pool.allocate_bytes(ByteCount::new(5000)).unwrap();
    assert_eq!((pool.kind(), block.kind()), (StorageKind::Pinned, StorageKind::Pinned));
    assert_eq!(block.granted(), ByteCount::kib(8));
    let first = block.location();
    drop(block);
    assert_eq!(pool.allocate_bytes(ByteCount::new(8000)).unwrap().location(), first);
    assert_eq!(upstream.allocated(), 1);
    drop(pool);
    upstream.assert_all_freed();
}

#[test]
fn unpooled_sizes_are_allocated_from_the_upstream() {
    let upstream = Counted::unlimited();
    let options = PoolOptions { largest_class: ByteCount::mib(1), ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let empty = pool.allocate_bytes(ByteCount::ZERO).unwrap();
    assert!(empty.length().is_zero());
    let large = pool.allocate_bytes(ByteCount::mib(3)).unwrap();
    assert_eq!(large.granted(), ByteCount::mib(3));
    let strict = RegionRequest::new(ByteCount::kib(4)).aligned_to(Alignment::HUGE_PAGE);
    let strict = pool.allocate(&strict).unwrap();
    assert!(strict.location().alignment() >= Alignment::HUGE_PAGE);
    drop((empty, large, strict));
    assert_eq!(pool.snapshot().cached, ByteCount::ZERO);
    upstream.assert_empty();
}

/// Returns half of the requested bytes, or all of them at an unaligned address.
#[derive(Debug)]
struct Careless(Counted, Fault);

#[derive(Clone, Copy, Debug)]
enum Fault {
    Half,
    Unaligned,
}

// SAFETY: the returned memory belongs to the test alone.
unsafe impl Allocate for Careless {
    type Memory = <Counted as Allocate>::Memory;

    delegate_allocate!(self, self.0);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let careless = match self.1 {
            Fault::Half => {
                RegionRequest { bytes: ByteCount::new(request.bytes.get() / 2), ..request.clone() }
            }
            Fault::Unaligned => RegionRequest { alignment: Alignment::BYTE, ..request.clone() },
        };
        self.0.allocate(&careless)
    }
}

#[test]
fn memory_that_does_not_hold_the_block_is_refused() {
    let stride = ByteCount::kib(36);
    let slab = SizeClasses::ExactSlab { stride, count: 4 };
    for classes in [SizeClasses::PowerOfTwo, slab] {
        for fault in [Fault::Half, Fault::Unaligned] {
            let upstream = Counted::unlimited();
            let alignment = Alignment::HUGE_PAGE;
            let classes = if matches!(fault, Fault::Half) { classes } else { SizeClasses::Steps4 };
            let options = PoolOptions { classes, ..PoolOptions::default() };
            let options = match fault {
                Fault::Half => options,
                Fault::Unaligned => PoolOptions { alignment, ..options },
            };
            let pool = Pool::new(Careless(upstream.clone(), fault), options).unwrap();
            // A size that is pooled, and a size that is too large.
            for bytes in [stride, ByteCount::gib(2)] {
                let request = RegionRequest::new(bytes).aligned_to(alignment);
                let request =
                    if matches!(fault, Fault::Half) { RegionRequest::new(bytes) } else { request };
                let error = pool.allocate(&request).unwrap_err();
                let AllocateError::Backend { source, .. } = &error else { panic!("{error}") };
                let source = source.downcast_ref::<PoolError>();
                assert!(matches!(source, Some(PoolError::UnfitUpstream { .. })), "{error}");
            }
            assert!(pool.allocate_bytes(ByteCount::ZERO).is_ok());
            upstream.assert_empty();
        }
    }
}

/// Memory whose drop panics while `armed`, after it was freed.
#[derive(Clone, Debug, Default)]
struct Explosive(Arc<AtomicBool>);

#[derive(Debug)]
struct Charge(Arc<AtomicBool>);

impl Drop for Charge {
    fn drop(&mut self) {
        assert!(!self.0.swap(false, Ordering::Relaxed), "armed");
    }
}

// SAFETY: the returned memory belongs to the test alone.
unsafe impl Allocate for Explosive {
    type Memory = ForeignMemory<Charge>;

    fn kind(&self) -> StorageKind {
        StorageKind::Device(DeviceId::new(0))
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let address = DeviceAddress::new(1 << 30);
        let location = Location::Device { device: DeviceId::new(0), address };
        let span = Span { kind: self.kind(), location, length: request.bytes };
        // SAFETY: no code accesses memory of a device that does not exist.
        Ok(unsafe { ForeignMemory::new(span, Charge(Arc::clone(&self.0))) })
    }
}

#[test]
fn a_panic_of_the_upstream_takes_nothing_off_the_cap() {
    let upstream = Explosive::default();
    let (small, large) = (ByteCount::kib(4), ByteCount::kib(8));
    let cached_bytes = ByteCount::kib(12);
    let options = PoolOptions { cached_bytes, magazine_depth: 0, ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let fill = || drop([small, large].map(|bytes| pool.allocate_bytes(bytes).unwrap()));
    fill();
    upstream.0.store(true, Ordering::Relaxed);
    let cleared = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pool.clear()));
    assert!(cleared.is_err());
    assert_eq!(pool.snapshot().held, ByteCount::ZERO);
    fill();
    assert_eq!(pool.snapshot().cached, cached_bytes);
}

#[test]
fn slabs_come_and_go_as_a_whole() {
    let upstream = Counted::unlimited();
    let stride = ByteCount::kib(36);
    let classes = SizeClasses::ExactSlab { stride, count: 100 };
    let pool = Pool::new(upstream.clone(), PoolOptions { classes, ..Default::default() }).unwrap();
    let mut blocks: Vec<_> = (0..100).map(|_| pool.allocate_bytes(stride).unwrap()).collect();
    assert_eq!(upstream.regions(), 1);
    assert_eq!(pool.snapshot().held.get(), 100 * stride.get());
    let mut addresses: Vec<_> = blocks.iter().map(address).collect();
    addresses.sort_unstable();
    assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] == stride.get()));
    let kept = blocks.pop();
    blocks.clear();
    assert_eq!(pool.clear(), ByteCount::ZERO, "a block of the slab is in use");
    assert_eq!(pool.snapshot().cached.get(), 99 * stride.get());
    drop(kept);
    assert_eq!(pool.clear().get(), 100 * stride.get());
    upstream.assert_empty();
}

/// A trim moves the blocks of magazines that it keeps to the queue of their class, which is full.
#[test]
fn blocks_that_a_trim_cannot_keep_count_to_no_limit() {
    let upstream = Counted::unlimited();
    let options = PoolOptions { blocks_per_class: 4, magazine_depth: 28, ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let fill = |count: usize| {
        let blocks = (0..count).map(|_| pool.allocate_bytes(ByteCount::kib(4)).unwrap());
        drop(blocks.collect::<Vec<_>>());
    };
    fill(20);
    assert_eq!(pool.snapshot().cached, ByteCount::kib(80));
    assert_eq!(pool.trim(ByteCount::kib(40)), ByteCount::kib(64));
    let seen = pool.snapshot();
    assert_eq!(seen.cached, ByteCount::kib(16), "four blocks of the class");
    assert_eq!(seen.classes.iter().map(|class| class.evictions).sum::<u64>(), 16);
    fill(8);
    assert_eq!(pool.snapshot().cached, ByteCount::kib(32), "the limit is not used up");
    pool.clear();
    upstream.assert_empty();
}

#[test]
fn caps_hold() {
    let upstream = Counted::unlimited();
    let options = PoolOptions {
        cached_bytes: ByteCount::kib(64),
        blocks_per_class: 4,
        magazine_depth: 0,
        ..PoolOptions::default()
    };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let blocks: Vec<_> = (0..10).map(|_| pool.allocate_bytes(ByteCount::kib(4)).unwrap()).collect();
    drop(blocks);
    let seen = pool.snapshot();
    assert_eq!(seen.cached, ByteCount::kib(16), "four blocks of the class");
    assert_eq!(seen.classes.iter().map(|class| class.evictions).sum::<u64>(), 6);
    let large: Vec<_> = (0..10).map(|_| pool.allocate_bytes(ByteCount::kib(16)).unwrap()).collect();
    drop(large);
    assert!(pool.snapshot().cached <= ByteCount::kib(64));
    assert_eq!(pool.trim(ByteCount::kib(20)).get() % 4096, 0);
    assert!(pool.snapshot().cached <= ByteCount::kib(20));
    pool.clear();
    upstream.assert_empty();
}

#[test]
fn an_idle_class_makes_room_for_a_busy_one() {
    let upstream = Counted::unlimited();
    let options = PoolOptions {
        cached_bytes: ByteCount::kib(64),
        magazine_depth: 0,
        ..PoolOptions::default()
    };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    drop(pool.allocate_bytes(ByteCount::kib(64)).unwrap());
    for _ in 0..200 {
        drop(pool.allocate_bytes(ByteCount::kib(4)).unwrap());
    }
    let seen = pool.snapshot();
    assert_eq!(seen.cached, ByteCount::kib(4), "the idle block was freed, the busy one is cached");
    drop(pool);
    upstream.assert_empty();
}

#[test]
fn labels_are_counted() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let request = |label: &str| RegionRequest::new(ByteCount::kib(4)).labelled(label.to_owned());
    let weights = [pool.allocate(&request("weights")), pool.allocate(&request("weights"))];
    let scratch = pool.allocate(&request("scratch")).unwrap();
    let tag = pool.tag(&"scratch".into());
    assert_ne!(tag, Tag::NONE);
    let more = pool.allocate_tagged(ByteCount::kib(64), tag).unwrap();
    let seen = |pool: &Pool<Counted>| -> Vec<_> {
        let labels = pool.snapshot().labels;
        labels.iter().map(|(label, bytes)| (label.to_string(), bytes.get() >> 10)).collect()
    };
    assert_eq!(seen(&pool), [("scratch".to_owned(), 68), ("weights".to_owned(), 8)]);
    drop((more, scratch));
    assert_eq!(seen(&pool), [("weights".to_owned(), 8)]);
    drop(weights);
    assert!(seen(&pool).is_empty());
}

#[test]
fn a_closed_pool_refuses_and_keeps_nothing() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), PoolOptions::default()).unwrap();
    let late = pool.allocate_bytes(ByteCount::kib(4)).unwrap();
    drop(pool.allocate_bytes(ByteCount::kib(64)).unwrap());
    pool.close();
    assert_eq!(upstream.bytes(), ByteCount::kib(4));
    let refused = pool.allocate_bytes(ByteCount::kib(4)).unwrap_err();
    assert!(matches!(refused, AllocateError::Closed { .. }), "{refused}");
    drop(late);
    upstream.assert_empty();
}

#[test]
fn options_are_checked_against_the_upstream() {
    struct Small(Counted);
    // SAFETY: the returned memory belongs to the test alone.
    unsafe impl Allocate for Small {
        type Memory = <Counted as Allocate>::Memory;
        fn kind(&self) -> StorageKind {
            self.0.kind()
        }
        fn limits(&self) -> Limits {
            Limits { largest_region: Some(ByteCount::mib(1)), ..Limits::NONE }
        }
        fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
            self.0.allocate(request)
        }
    }
    let error = Pool::new(Small(Counted::unlimited()), PoolOptions::default()).err().unwrap();
    assert!(matches!(error, PoolError::UpstreamTooSmall { .. }), "{error}");
    let classes = SizeClasses::ExactSlab { stride: ByteCount::kib(4), count: 257 };
    let options = PoolOptions { classes, ..PoolOptions::default() };
    assert!(Pool::new(Small(Counted::unlimited()), options).is_err());
}

#[test]
fn a_pool_over_a_pool() {
    let upstream = Counted::unlimited();
    let small = PoolOptions { largest_class: ByteCount::mib(1), ..powers_of_two() };
    let inner = Arc::new(Pool::new(upstream.clone(), powers_of_two()).unwrap());
    let outer = Pool::new(Arc::clone(&inner), small).unwrap();
    let block = outer.allocate_bytes(ByteCount::kib(100)).unwrap();
    let large = outer.allocate_bytes(ByteCount::mib(2)).unwrap();
    drop((block, large));
    assert_eq!(outer.clear(), ByteCount::kib(128));
    assert_eq!(inner.snapshot().cached.get(), (128 << 10) + (2 << 20));
    drop((outer, inner));
    upstream.assert_empty();
}

/// A block below the upstream's granule occupies a granule, and is counted as one.
#[test]
fn classes_are_whole_granules_of_the_upstream() {
    let limits = Limits { granule: Alignment::PAGE, ..Limits::NONE };
    let upstream = Simulated::new(SimulatedOptions { limits, ..SimulatedOptions::default() });
    let pool = Pool::new(upstream, PoolOptions::default()).unwrap();
    assert_eq!(pool.options().smallest_class, ByteCount::kib(4));
    let block = pool.allocate_bytes(ByteCount::new(1)).unwrap();
    assert_eq!(block.granted(), ByteCount::kib(4));
    assert_eq!(pool.snapshot().held, ByteCount::kib(4));
    drop(block);
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.cached, snapshot.live), (ByteCount::kib(4), ByteCount::ZERO));
    // Nor is any class in between counted as less than it holds.
    drop(pool.allocate_bytes(ByteCount::new(5000)).unwrap());
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.cached, snapshot.live), (ByteCount::kib(12), ByteCount::ZERO));
    assert_eq!(snapshot.held, snapshot.cached);
}

#[test]
fn the_last_handle_closes_the_pool() {
    let upstream = Counted::unlimited();
    let pool = Pool::new(upstream.clone(), powers_of_two()).unwrap();
    let other = pool.clone();
    drop(pool.allocate_bytes(ByteCount::kib(4)).unwrap());
    drop(pool);
    assert_eq!(other.snapshot().cached, ByteCount::kib(4), "both handles are of one pool");
    let block = other.allocate_bytes(ByteCount::kib(4)).unwrap();
    assert_eq!(upstream.allocations(), 1);
    drop(other);
    drop(block);
    upstream.assert_empty();
}
