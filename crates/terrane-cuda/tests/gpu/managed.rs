//! Managed device memory: budget, identity, uses by streams, reinterpretation.

use std::sync::Arc;

use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};
use terrane_cuda::{
    Context, CudaStreams, DeviceAllocator, DevicePool, PinnedAllocator, PinnedOptions,
};
use terrane_pool::adaptors::{Adapt, AnyUpstream, Budget, Counters, Erased, LiveBlocks, TraceSink};
use terrane_pool::managed::{Lifecycle, ManagedError, ManagerOptions, MemoryManager};
use terrane_pool::{Access, Pool, PoolOptions, StreamId, StreamSource};
use terrane_testkit::pattern::PieceAccess;

use crate::needs::{LITTLE, OnDevice, device};

fn manager(context: &Context, streams: &CudaStreams) -> MemoryManager<DeviceAllocator> {
    let options =
        ManagerOptions { fences: Some(Arc::new(streams.clone())), ..ManagerOptions::default() };
    let budget = Budget::new("device", ByteCount::mib(16));
    MemoryManager::new(DeviceAllocator::new(context), budget, options)
}

#[test]
fn a_budget_is_enforced_and_a_refusal_names_the_live_blocks() {
    let name = "a_budget_is_enforced_and_a_refusal_names_the_live_blocks";
    let Some(context) = device(name, LITTLE) else { return };
    let manager = manager(&context, &CudaStreams::new(&context));
    let window = manager.window();
    let scores = manager.allocate_slice::<f32>(1 << 20).unwrap();
    assert_eq!((manager.allocated(), manager.remaining()), (ByteCount::mib(4), ByteCount::mib(12)));
    assert_eq!(context.usage().device.bytes, ByteCount::mib(4));
    let error = manager.allocate_slice::<f64>(2 << 20).unwrap_err();
    assert!(error.is_exhaustion(), "{error}");
    assert!(manager.check(ByteCount::mib(12)).is_ok());
    let over = manager.check(ByteCount::mib(13)).unwrap_err();
    assert!(over.to_string().contains("4 MiB"), "{over}");
    let more = manager.allocate_bytes(ByteCount::mib(12), "rest").unwrap();
    assert_eq!(manager.peak(), ByteCount::mib(16));
    drop((more, scores));
    assert_eq!((manager.allocated(), manager.requests()), (ByteCount::ZERO, 3));
    manager.reset_peak();
    assert_eq!(manager.peak(), ByteCount::ZERO);
    let totals = window.totals();
    assert_eq!((totals.total.count, totals.failed), (2, 1));
    assert_eq!(context.usage().device.count, 0);

    // Zero bytes are valid, and need no driver call.
    let nothing = manager.allocate_slice::<u64>(0).unwrap();
    assert!(nothing.is_empty() && nothing.as_bytes().is_empty());
    assert_eq!(context.usage().device.count, 0);
}

#[test]
fn bytes_are_reinterpreted_in_place() {
    let name = "bytes_are_reinterpreted_in_place";
    let Some(context) = device(name, LITTLE) else { return };
    let manager = manager(&context, &CudaStreams::new(&context));
    let access = OnDevice::new(&context);
    let words = manager.allocate_slice::<u32>(5).unwrap();
    // SAFETY: no other code uses the slice.
    unsafe { access.write(words.location(), &[1, 0, 0, 0, 2, 0, 0, 0]) }.unwrap();
    let view = words.view_as::<u16>().unwrap();
    assert_eq!((view.len(), view.location()), (10, words.location()));
    let partial = words.view_as::<u64>().unwrap_err();
    assert!(matches!(partial, ManagedError::PartialElement { .. }), "{partial}");
    let mut bytes = words.into_bytes();
    assert_eq!(bytes.len(), 20);
    // SAFETY: nothing else accesses it.
    let refused = unsafe { bytes.host_slice() }.unwrap_err();
    assert!(matches!(refused, ManagedError::NotHost { .. }), "{refused}");
    let words = bytes.try_cast::<u32>().unwrap();
    let mut seen = [0; 8];
    // SAFETY: no other code uses the slice.
    unsafe { access.read(words.location(), &mut seen) }.unwrap();
    assert_eq!(seen, [1, 0, 0, 0, 2, 0, 0, 0]);
}

#[test]
fn a_block_is_freed_after_the_streams_that_use_it() {
    let name = "a_block_is_freed_after_the_streams_that_use_it";
    let Some(context) = device(name, LITTLE) else { return };
    let streams = CudaStreams::new(&context);
    let manager = manager(&context, &streams);
    let ids = [(); 2].map(|()| StreamSource::create(&streams).unwrap());
    let block = manager.allocate_slice_tagged::<u8>(8 << 20, "kv", Some(ids[0])).unwrap();
    let handle = block.block().handle();
    let identity = manager.identity(handle).unwrap();
    assert_eq!((identity.state, identity.tag.as_str()), (Lifecycle::Live, "kv"));
    for (id, access) in [(ids[0], Access::Write), (ids[1], Access::Read), (ids[1], Access::Write)] {
        let stream = streams.get(id).unwrap();
        for round in 0..10 {
            // SAFETY: the block is alive until both streams have finished. Its contents do not
            // matter.
            unsafe { stream.fill(block.location(), round, block.bytes()) }.unwrap();
        }
        block.block().record_use(id, access).unwrap();
    }
    assert_eq!(block.block().uses().len(), 2, "one entry for each stream");
    drop(block);
    // The memory exists until the streams have finished.
    let state = manager.identity(handle).unwrap().state;
    assert!(state == Lifecycle::PendingFree || state == Lifecycle::Freed);
    for id in ids {
        streams.get(id).unwrap().synchronize().unwrap();
    }
    manager.reap();
    assert_eq!(manager.identity(handle).unwrap().state, Lifecycle::Freed);
    assert_eq!((manager.pending(), context.usage().device.count), (0, 0));
    let gone = manager.locate(handle, ByteCount::ZERO, ByteCount::new(1)).unwrap_err();
    assert!(gone.is_use_after_free(), "{gone}");

    // A use on an unknown stream cannot be waited for, so the block is kept.
    let next = manager.allocate_bytes(ByteCount::mib(1), "next").unwrap();
    let stale = manager.locate(handle, ByteCount::ZERO, ByteCount::new(1)).unwrap_err();
    assert!(stale.is_use_after_free(), "{stale}");
    next.record_use(StreamId::new(u64::MAX), Access::Read).unwrap();
    drop(next);
    manager.reap();
    assert_eq!((manager.pending(), context.usage().device.count), (1, 1));
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn adaptors_compose_over_a_pool_over_the_device() {
    let name = "adaptors_compose_over_a_pool_over_the_device";
    let Some(context) = device(name, LITTLE) else { return };
    let counters = Counters::new();
    let (live, budget) = (LiveBlocks::new(), Budget::new("node", ByteCount::mib(24)));
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let driver_pool = DevicePool::new(&context, ByteCount::mib(32)).unwrap();
    let stack = |upstream: AnyUpstream, share: ByteCount| {
        let pool = Pool::new(upstream, PoolOptions::default()).unwrap();
        pool.limited(budget.child("tier", share))
            .traced(TraceSink::new(Vec::new()))
            .counted(counters.clone())
            .tagged(live.clone())
    };
    let tiers = [
        stack(Erased::shared(DeviceAllocator::new(&context)), ByteCount::mib(8)),
        stack(Erased::shared(driver_pool), ByteCount::mib(8)),
        stack(Erased::shared(pinned), ByteCount::mib(8)),
    ];
    for tier in &tiers {
        let of = |mib| RegionRequest::new(ByteCount::mib(mib)).labelled("kv");
        let first = tier.allocate(&of(4)).unwrap();
        let second = tier.allocate(&of(4)).unwrap();
        assert!(tier.allocate(&of(1)).unwrap_err().is_exhaustion());
        let at = first.location();
        drop(first);
        // The budget is free again, and the pool has the block.
        assert_eq!(tier.allocate(&of(4)).unwrap().location(), at);
        drop(second);
        if let Location::Host(address) = at {
            assert!(address.get() > 0);
        }
    }
    let totals = counters.totals();
    assert_eq!((totals.total.count, totals.failed, totals.current.bytes), (9, 3, 0));
    drop(tiers);
    let usage = context.usage();
    assert_eq!((usage.device.count, usage.pooled.count, usage.registered.count), (0, 0, 0));
    assert_eq!(budget.live(), ByteCount::ZERO);
}
