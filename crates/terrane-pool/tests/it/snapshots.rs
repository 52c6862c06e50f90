//! Snapshots of a pool between two tables.

use std::sync::Arc;
use std::thread;

use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
use terrane_pool::adaptors::{Adapt, BlockState, Inspect as _, LiveBlocks, Snapshot, Tags};
use terrane_pool::{Pool, PoolOptions, SizeClasses, StreamId};
use terrane_testkit::simulated::{Simulated, SimulatedOptions, SimulatedStreams};

use crate::support::Counted;

type Device = Arc<Simulated>;
type Stack = Tags<Arc<Pool<Device>>>;

fn stack(classes: SizeClasses) -> (Stack, Arc<Pool<Device>>, LiveBlocks, Device) {
    let device = Arc::new(Simulated::new(SimulatedOptions::default()));
    let live = LiveBlocks::new();
    let options = PoolOptions { classes, ..PoolOptions::default() };
    let pool = Arc::new(Pool::new(Arc::clone(&device), options).unwrap());
    (Arc::clone(&pool).tagged(live.clone()), pool, live, device)
}

fn bytes_of(snapshot: &Snapshot, state: BlockState) -> Vec<u64> {
    let of_state = snapshot.blocks.iter().filter(|block| block.state == state);
    let mut bytes: Vec<_> = of_state.map(|block| block.span.length.get()).collect();
    bytes.sort_unstable();
    bytes
}

#[test]
fn every_block_is_shown_live_or_cached() {
    let (tagged, pool, live, device) = stack(SizeClasses::PowerOfTwo);
    let obtain = |bytes, label: &'static str| {
        tagged.allocate(&RegionRequest::new(ByteCount::new(bytes)).labelled(label)).unwrap()
    };
    let kept = obtain(700, "kv");
    drop([obtain(3000, "scratch"), obtain(600, "scratch")]);
    let snapshot = Snapshot::of(&[&live, &*pool]);
    assert_eq!(bytes_of(&snapshot, BlockState::Live), [1024]);
    assert_eq!(bytes_of(&snapshot, BlockState::Cached), [1024, 4096]);
    let in_use = snapshot.blocks.iter().find(|block| block.state == BlockState::Live);
    assert_eq!(in_use.unwrap().tag.as_str(), "kv");
    let all: u64 = snapshot.blocks.iter().map(|block| block.span.length.get()).sum();
    assert_eq!(all, device.usage().live_bytes.get());
    drop(kept);
    pool.clear();
    assert_eq!(Snapshot::of(&[&live, &*pool]), Snapshot::default());
}

#[test]
fn the_free_parts_of_a_slab_are_cached() {
    let classes = SizeClasses::ExactSlab { stride: ByteCount::kib(1), count: 8 };
    let (tagged, pool, live, _) = stack(classes);
    let request = RegionRequest::new(ByteCount::kib(1)).labelled("kv");
    let mut blocks: Vec<_> = (0..8).map(|_| tagged.allocate(&request).unwrap()).collect();
    blocks.sort_by_key(|block| block.location().alignment());
    assert_eq!(bytes_of(&Snapshot::of(&[&live, &*pool]), BlockState::Cached), [0; 0]);
    blocks.truncate(3);
    let snapshot = Snapshot::of(&[&live, &*pool]);
    assert_eq!(bytes_of(&snapshot, BlockState::Live), [1024; 3]);
    assert_eq!(bytes_of(&snapshot, BlockState::Cached).iter().sum::<u64>(), 5 * 1024);
}

#[test]
fn snapshots_include_blocks_of_threads_and_streams() {
    let streams = SimulatedStreams::new(7);
    let options = PoolOptions { magazine_depth: 4, ..PoolOptions::default() };
    let device = Simulated::new(SimulatedOptions::default());
    let pool = Pool::with_fences(device, options, Arc::new(streams.clone())).unwrap();
    let stream = StreamId::new(1);
    streams.submit(stream, || {});
    let request = RegionRequest::new(ByteCount::kib(1));
    // More blocks than fit in a magazine, so some are in the shared queue.
    let blocks: Vec<_> = (0..20).map(|_| pool.allocate_bytes(request.bytes).unwrap()).collect();
    let on_a_stream: Vec<_> = (0..3).map(|_| pool.allocate_on(stream, &request).unwrap()).collect();
    drop(blocks);
    drop(on_a_stream);
    thread::scope(|scope| {
        scope.spawn(|| drop(pool.allocate_bytes(ByteCount::kib(2)).unwrap())).join().unwrap();
    });
    let before = pool.snapshot();
    let snapshot = Snapshot::of(&[&pool]);
    let cached = bytes_of(&snapshot, BlockState::Cached);
    let pending = bytes_of(&snapshot, BlockState::Pending);
    assert_eq!((cached.len(), pending.as_slice()), (21, &[1024; 3][..]));
    assert_eq!(cached.iter().sum::<u64>(), before.cached.get());
    assert!(before.classes.iter().any(|class| class.in_queue > 0), "{before:?}");
    // A snapshot changes nothing.
    assert_eq!(format!("{:?}", pool.snapshot().classes), format!("{:?}", before.classes));
    assert_eq!(Snapshot::of(&[&pool]), snapshot);
    streams.run_all();
}

#[test]
fn a_pool_may_be_used_while_it_is_listed() {
    let upstream = Counted::unlimited();
    // One block in the magazine, the others in the queue.
    let options = PoolOptions { magazine_depth: 1, ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let size = ByteCount::kib(4);
    drop([(); 3].map(|()| pool.allocate_bytes(size).unwrap()));
    let (cached, mut seen) = (pool.snapshot().cached, 0);
    pool.inspect(&mut |_| {
        seen += 1;
        drop(pool.allocate_bytes(size).unwrap());
    });
    assert_eq!(seen, 3);
    let listing = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        pool.inspect(&mut |_| std::panic::resume_unwind(Box::new("enough")));
    }));
    assert!(listing.is_err());
    assert_eq!(pool.snapshot().cached, cached);
    pool.clear();
    upstream.assert_empty();
}
