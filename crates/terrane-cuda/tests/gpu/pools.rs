//! A pool of `terrane-pool` over device memory, in the order of real streams.

use std::num::NonZeroUsize;
use std::sync::Arc;

use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
use terrane_cuda::{CudaStreams, DeviceAllocator, DevicePool, PinnedAllocator, PinnedOptions};
use terrane_pool::{Access, Pool, PoolOptions, StreamPool};
use terrane_testkit::pattern::{InProcess, PieceAccess};

use crate::needs::{Needs, device};

/// A stream copies out its own last write to its block, whichever stream used the block before or
/// after.
#[test]
fn blocks_change_hands_in_the_order_of_streams() {
    let needs = Needs { device: ByteCount::gib(2), host: ByteCount::mib(64) };
    let name = "blocks_change_hands_in_the_order_of_streams";
    let Some(context) = device(name, needs) else { return };
    let streams = CudaStreams::new(&context);
    let four = NonZeroUsize::new(4).unwrap();
    let lent = StreamPool::new(Arc::new(streams.clone()), four).unwrap();
    let upstream = DeviceAllocator::new(&context);
    let pool =
        Pool::with_fences(upstream, PoolOptions::default(), Arc::new(streams.clone())).unwrap();
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let bytes = ByteCount::mib(16);
    let rounds = 64_u8;
    let slot = ByteCount::kib(4);
    let seen = pinned.allocate(&RegionRequest::new(ByteCount::kib(4 * 64))).unwrap();
    let mut places = std::collections::BTreeSet::new();
    for round in 0..rounds {
        let id = lent.any();
        let stream = streams.get(id).unwrap();
        let mut block = pool.allocate_on(id, &RegionRequest::new(bytes)).unwrap();
        let offset = slot.checked_mul("round", u64::from(round)).unwrap();
        let out = seen.location().checked_add(offset).unwrap();
        places.insert(block.location().to_string());
        // SAFETY: the block belongs to this stream until it is released on it.
        unsafe { stream.fill(block.location(), !round, bytes) }.unwrap();
        // SAFETY: as above.
        unsafe { stream.fill(block.location(), round, bytes) }.unwrap();
        // SAFETY: as above, and the pinned memory is alive until all streams have been
        // synchronised.
        unsafe { stream.copy(block.location(), out, slot) }.unwrap();
        block.record_use(id, Access::Write).unwrap();
        block.release_on(id).map_err(|(_, error)| error).unwrap();
    }
    for &id in lent.streams() {
        streams.get(id).unwrap().synchronize().unwrap();
    }
    for round in 0..rounds {
        let offset = slot.checked_mul("round", u64::from(round)).unwrap();
        let mut found = vec![0; slot.to_usize()];
        // SAFETY: the copies have run.
        unsafe { InProcess.read(seen.location().checked_add(offset).unwrap(), &mut found) }
            .unwrap();
        assert!(found.iter().all(|&byte| byte == round), "round {round}: {:?}", &found[..4]);
    }
    assert!(places.len() < usize::from(rounds), "blocks are used again");
    drop(pool);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn a_pool_above_the_drivers_pool_trims_it_when_memory_runs_out() {
    let needs = Needs { device: ByteCount::gib(2), host: ByteCount::mib(64) };
    let name = "a_pool_above_the_drivers_pool_trims_it_when_memory_runs_out";
    let Some(context) = device(name, needs) else { return };
    let driver_pool = DevicePool::new(&context, ByteCount::new(u64::MAX)).unwrap();
    // The driver's pool has almost all memory, and none of it is in use.
    let (free, _) = context.memory().unwrap();
    let most = free.checked_sub(ByteCount::gib(1)).unwrap();
    drop(driver_pool.allocate(&RegionRequest::new(most)).unwrap());
    assert!(driver_pool.held().unwrap() >= most);
    let pool = Pool::new(DeviceAllocator::new(&context), PoolOptions::default())
        .unwrap()
        .with_upstream_trim(driver_pool.clone());
    let block =
        pool.allocate_bytes(ByteCount::gib(2)).expect("the driver's pool was trimmed for it");
    assert!(block.length() >= ByteCount::gib(2));
    assert!(driver_pool.held().unwrap() < most);
}
