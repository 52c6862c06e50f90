//! Size-class pools over every kind of CUDA memory: classes, caps, statistics, and the driver calls
//! of a hit.

use std::num::NonZeroUsize;
use std::sync::Arc;

use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
use terrane_cuda::{
    Context, CudaStreams, DeviceAllocator, DevicePool, PinnedAllocator, PinnedOptions,
    ResourceCount,
};
use terrane_pool::{Pool, PoolOptions, SizeClasses, StreamPool, StreamSource};

use crate::needs::{LITTLE, device};

const CAP: ByteCount = ByteCount::mib(4);

fn capped() -> PoolOptions {
    PoolOptions {
        classes: SizeClasses::PowerOfTwo,
        cached_bytes: CAP,
        cached_percent: 100,
        blocks_per_class: 2,
        magazine_depth: 0,
        ..PoolOptions::default()
    }
}

/// Classes are powers of two, caps apply, and the driver's allocations equal the pool's statistics.
fn classes_caps_and_accounts<A: Allocate>(upstream: A, held: impl Fn() -> ResourceCount) {
    let pool = Pool::new(upstream, capped()).unwrap();
    for asked in [1, 5000, 8193, 1 << 20, 3 << 19] {
        let block = pool.allocate_bytes(ByteCount::new(asked)).unwrap();
        let granted = block.granted().get();
        assert!(granted.is_power_of_two() && granted >= asked, "{granted}");
        assert!(granted < 2 * asked || granted <= 4096, "{granted}");
        assert_eq!(block.length(), block.granted());
        assert!(block.location().alignment().get() >= 512);
        assert_eq!(pool.snapshot().held, held().bytes);
        let again = pool.allocate_bytes(ByteCount::new(asked)).unwrap();
        assert_ne!(again.location(), block.location());
    }
    pool.clear();
    assert_eq!(held(), ResourceCount::default(), "cleared to nothing");

    // Three blocks of each class: two may stay in a class, and all together at most the cap.
    for bytes in [ByteCount::kib(64), ByteCount::mib(1), ByteCount::mib(2)] {
        let blocks = [(); 3].map(|()| pool.allocate_bytes(bytes).unwrap());
        let snapshot = pool.snapshot();
        assert_eq!(snapshot.held, held().bytes);
        assert!(snapshot.live >= bytes.checked_mul("blocks", 3).unwrap());
        drop(blocks);
        let snapshot = pool.snapshot();
        assert!(snapshot.cached <= CAP, "{}", snapshot.cached);
        assert!(snapshot.classes.iter().all(|class| class.in_queue <= 2));
        assert_eq!((snapshot.held, snapshot.live), (held().bytes, ByteCount::ZERO));
    }
    let before = pool.snapshot().cached;
    assert!(!before.is_zero());
    let freed = pool.trim(ByteCount::kib(64));
    let after = pool.snapshot().cached;
    assert!(after <= ByteCount::kib(64));
    assert_eq!(before.checked_sub(freed), Some(after));
    drop(pool);
    assert_eq!(held(), ResourceCount::default());
}

#[test]
fn device_memory_is_pooled_by_size_classes() {
    let name = "device_memory_is_pooled_by_size_classes";
    let Some(context) = device(name, LITTLE) else { return };
    classes_caps_and_accounts(DeviceAllocator::new(&context), || context.usage().device);
    let pool = DevicePool::new(&context, ByteCount::mib(32)).unwrap();
    classes_caps_and_accounts(pool, || context.usage().pooled);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn pinned_memory_is_pooled_by_size_classes() {
    let name = "pinned_memory_is_pooled_by_size_classes";
    let Some(context) = device(name, LITTLE) else { return };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    classes_caps_and_accounts(pinned, || context.usage().registered);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn blocks_of_a_pinned_slab_have_no_padding_and_a_device_address() {
    let name = "blocks_of_a_pinned_slab_have_no_padding_and_a_device_address";
    let Some(context) = device(name, LITTLE) else { return };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    // KV blocks of 144 KiB, which a class of powers of two rounds up to 256 KiB.
    let stride = ByteCount::kib(144);
    let options = PoolOptions {
        classes: SizeClasses::ExactSlab { stride, count: 64 },
        ..PoolOptions::default()
    };
    let pool = Pool::new(pinned, options).unwrap();
    let blocks: Vec<_> = (0..64).map(|_| pool.allocate_bytes(stride).unwrap()).collect();
    let held = context.usage().registered;
    assert_eq!((held.count, held.bytes), (1, stride.checked_mul("blocks", 64).unwrap()));
    let mut aliases: Vec<u64> =
        blocks.iter().map(|block| block.device_alias().unwrap().get()).collect();
    aliases.sort_unstable();
    assert!(aliases.windows(2).all(|pair| pair[1] - pair[0] == stride.get()));
}

/// The driver calls that no hit makes: creating an event, a stream or memory.
fn check_that_hits_make_no_driver_call<A: Allocate>(context: &Context, upstream: A) {
    let streams = CudaStreams::new(context);
    let id = StreamSource::create(&streams).unwrap();
    let stream = streams.get(id).unwrap();
    let options = PoolOptions::default();
    let pool = Pool::with_fences(upstream, options, Arc::new(streams.clone())).unwrap();
    let request = RegionRequest::new(ByteCount::kib(64));
    drop(pool.allocate_on(id, &request).unwrap());
    let before = context.usage();
    for _ in 0..10_000 {
        let block = pool.allocate_on(id, &request).unwrap();
        // SAFETY: the block belongs to this stream until it is released on it.
        unsafe { stream.fill(block.location(), 1, ByteCount::new(64)) }.unwrap();
        block.release_on(id).map_err(|(_, error)| error).unwrap();
    }
    assert_eq!(context.usage(), before);
    stream.synchronize().unwrap();
    let hits: u64 = pool.snapshot().classes.iter().map(|class| class.magazine_hits).sum();
    let misses: u64 = pool.snapshot().classes.iter().map(|class| class.misses).sum();
    assert!(hits >= 9_999 && misses == 1, "{hits} hits, {misses} misses");
    drop(pool);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn a_hit_creates_no_event() {
    let Some(context) = device("a_hit_creates_no_event", LITTLE) else { return };
    check_that_hits_make_no_driver_call(&context, DeviceAllocator::new(&context));
    check_that_hits_make_no_driver_call(
        &context,
        DevicePool::new(&context, ByteCount::mib(64)).unwrap(),
    );
}

#[test]
fn streams_are_lent_and_destroyed_with_the_last_handle() {
    let name = "streams_are_lent_and_destroyed_with_the_last_handle";
    let Some(context) = device(name, LITTLE) else { return };
    let streams = CudaStreams::new(&context);
    let three = NonZeroUsize::new(3).unwrap();
    let pool = StreamPool::new(Arc::new(streams.clone()), three).unwrap();
    assert_eq!(context.usage().streams, 3);
    let turns: Vec<_> = (0..6).map(|_| pool.any()).collect();
    assert_eq!(turns[..3], turns[3..]);
    let leases = [(); 3].map(|()| pool.lease().unwrap());
    assert!(pool.lease().is_none());
    assert!(leases.iter().all(|lease| streams.get(lease.id()).unwrap().is_idle().unwrap()));
    let ids = leases.each_ref().map(|lease| lease.id());
    drop(pool);
    assert_eq!(context.usage().streams, 3, "leases keep them");
    drop(leases);
    assert_eq!(context.usage().streams, 0);
    assert!(ids.iter().all(|&id| streams.get(id).is_err()));
}
