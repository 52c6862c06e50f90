//! Tiers of memory above a disk tier, and without one.

use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, PhysicalLayout};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_store::{
    BlockGroup, BlockResult, Blocks, JobOptions, MemoryTier, NoRoom, Presence, Store, StoreError,
    TierId, Why, WritePolicy,
};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::random::Seeded;
use terrane_transfer::Endpoint;

use super::harness::{
    assert_at_rest, builder, content, disk, found, get, key, keys, namespace, put, put_ok, soon,
    submit_put,
};

const BLOCK: usize = 8192;

fn host(slots: u64) -> ByteCount {
    ByteCount::new(8192 * slots)
}

#[test]
fn a_put_through_is_in_both_tiers() {
    let directory = tempfile::tempdir().unwrap();
    let (store, _) = builder(directory.path(), 8192, 16).host(host(4)).open().unwrap();
    put_ok(&store, &keys(0..3), BLOCK);
    let Why::Present { tiers, .. } = store.why(0, &key(0)) else { panic!() };
    assert_eq!(tiers, [TierId::new(0), TierId::new(1)]);
    assert!(found(&store, &keys(0..3), BLOCK).iter().all(|&found| found));
    let snapshot = store.snapshot();
    assert_eq!((snapshot.tiers[0].hits, snapshot.tiers[1].hits), (3, 0));
    // More than the host tier has: the disk tier has all of them.
    put_ok(&store, &keys(10..20), BLOCK);
    assert!(found(&store, &keys(10..20), BLOCK).iter().all(|&found| found));
    assert_at_rest(&store);
    drop(store);
    let (store, recovery) = builder(directory.path(), 8192, 16).host(host(4)).open().unwrap();
    assert_eq!(recovery.found, 13);
    assert!(found(&store, &keys(0..3), BLOCK).iter().all(|&found| found));
}

#[test]
fn a_promoted_block_is_read_from_memory() {
    let directory = tempfile::tempdir().unwrap();
    drop({
        let (store, _) = builder(directory.path(), 8192, 16).host(host(4)).open().unwrap();
        put_ok(&store, &keys(0..6), BLOCK);
        store
    });
    let (store, _) = builder(directory.path(), 8192, 16).host(host(4)).open().unwrap();
    let job = store.promote(&keys(0..4), TierId::new(0), JobOptions::new()).unwrap();
    let outcome = job.wait();
    assert!(matches!(outcome.results[..], [BlockResult::Done { bytes: 8192 }, ..]), "{outcome:?}");
    let mut presence = [Presence::Absent; 1];
    store.presence(0, &keys(0..1), &mut presence);
    assert_eq!(presence, [Presence::Ready { tier: TierId::new(0), length: 8192 }]);
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true; 4]);
    assert_eq!(store.snapshot().tiers[0].hits, 4);
    let again = store.promote(&keys(3..5), TierId::new(0), JobOptions::new()).unwrap().wait();
    assert!(matches!(again.results[0], BlockResult::AlreadyStored), "{again:?}");
    let absent = store.promote(&keys(99..100), TierId::new(0), JobOptions::new()).unwrap().wait();
    assert!(matches!(absent.results[..], [BlockResult::Absent]));
    assert_at_rest(&store);
}

#[test]
fn written_back_blocks_survive_eviction_and_a_close() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let builder = builder(directory.path(), 8192, 64).host(host(4));
        builder.write_policy(WritePolicy::Back).open().unwrap()
    };
    let (store, _) = open();
    for number in 0..20 {
        put_ok(&store, &[key(number)], BLOCK);
    }
    assert!(found(&store, &keys(0..20), BLOCK).iter().all(|&found| found));
    assert_at_rest(&store);
    drop(store);
    let (store, recovery) = open();
    assert_eq!(recovery.found, 20);
    assert!(found(&store, &keys(0..20), BLOCK).iter().all(|&found| found));
}

#[test]
fn a_sync_writes_dirty_blocks_to_disk() {
    let directory = tempfile::tempdir().unwrap();
    let builder = builder(directory.path(), 8192, 64).host(host(16));
    let (store, _) = builder.write_policy(WritePolicy::Back).open().unwrap();
    put_ok(&store, &keys(0..5), BLOCK);
    assert_eq!(store.snapshot().tiers[0].groups[0].dirty, 5);
    assert_eq!(store.snapshot().tiers[1].groups[0].blocks, 0);
    assert!(store.sync().unwrap().wait().is_ok());
    assert_eq!(store.snapshot().tiers[0].groups[0].dirty, 0);
    assert_eq!(store.snapshot().tiers[1].groups[0].blocks, 5);
    // A durable put of a key that memory alone has writes it.
    put_ok(&store, &keys(5..6), BLOCK);
    let job = submit_put(&store, &keys(5..7), BLOCK, JobOptions::new().durable(true));
    assert!(job.wait().is_ok());
    assert_eq!(store.snapshot().tiers[1].groups[0].blocks, 7);
}

#[test]
fn blocks_are_written_after_their_uses() {
    let directory = tempfile::tempdir().unwrap();
    let builder = builder(directory.path(), 8192, 64).host(host(4));
    let (store, _) = builder.write_policy(WritePolicy::AfterUses(2)).open().unwrap();
    put_ok(&store, &keys(0..2), BLOCK);
    found(&store, &keys(0..1), BLOCK);
    assert_at_rest(&store);
    assert_eq!(store.snapshot().tiers[1].stored, 0);
    found(&store, &keys(0..1), BLOCK);
    let until = soon();
    while store.snapshot().tiers[1].stored == 0 && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(store.snapshot().tiers[1].stored, 1);
    // The other one is lost when it is evicted.
    for number in 10..30 {
        put_ok(&store, &[key(number)], BLOCK);
    }
    assert_eq!(found(&store, &keys(0..2), BLOCK), [true, false]);
    assert_at_rest(&store);
}

#[test]
fn a_tier_takes_memory_of_any_allocator_and_returns_it() {
    let directory = tempfile::tempdir().unwrap();
    let pinned = HeapAllocator::pinned();
    let tier = MemoryTier::allocated("pinned", host(4), pinned.clone());
    let (store, _) = builder(directory.path(), 8192, 16).memory_tier(tier).open().unwrap();
    assert_eq!(pinned.live_bytes(), host(4));
    put_ok(&store, &keys(0..4), BLOCK);
    assert!(found(&store, &keys(0..4), BLOCK).iter().all(|&found| found));
    assert_eq!(store.snapshot().tiers[0].hits, 4);
    assert_at_rest(&store);
    drop(store);
    pinned.assert_all_freed();
    // An allocator that has too little memory is named by its error, and nothing stays behind.
    let small = HeapAllocator::pinned().with_capacity(host(2));
    let tier = MemoryTier::allocated("pinned", host(4), small.clone());
    let refused = builder(directory.path(), 8192, 16).memory_tier(tier).open().unwrap_err();
    assert!(matches!(refused, StoreError::Layout(_)), "{refused}");
    small.assert_all_freed();
}

#[test]
fn a_store_of_memory_alone_works() {
    let group = BlockGroup::new("kv", 5000);
    let (store, _) = Store::builder().group(group).host(ByteCount::kib(64)).open().unwrap();
    put_ok(&store, &keys(0..8), 5000);
    assert_eq!(found(&store, &keys(0..9), 5000), [vec![true; 8], vec![false]].concat());
    put_ok(&store, &keys(10..14), 5000);
    assert_eq!(store.snapshot().tiers[0].groups[0].blocks, 8);
    assert!(store.clear().unwrap().wait().is_ok());
    assert_eq!(store.prefix(0, &keys(10..14)), 0);
    let outcome = put(&store, &keys(0..9), 5000);
    assert!(matches!(outcome.results[0], BlockResult::NoRoom(NoRoom::TierTooSmall { .. })));
    assert!(store.sync().unwrap().wait().is_ok());
    assert_at_rest(&store);
}

pub fn config(blocks: u32) -> LayoutConfig {
    config_of(blocks, 8)
}

fn config_of(blocks: u32, tokens: u32) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(3)
        .outer_dim(2)
        .page_size(tokens)
        .num_heads(4)
        .inner_dim(4 * 20)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

/// A layout with one region a layer, as engines have.
pub fn engine_layout(blocks: u32) -> PhysicalLayout {
    engine_layout_of(blocks, 8)
}

/// The same with blocks of so many tokens, of 960 bytes each.
pub fn engine_layout_of(blocks: u32, tokens: u32) -> PhysicalLayout {
    let system = SystemAllocator::new(SystemOptions::default());
    let config = config_of(blocks, tokens);
    let layout = LayoutBuilder::new(config).layer_separate(BlockDimension::Second);
    layout.allocate(&system).unregistered().build().unwrap()
}

/// Fills the blocks of an endpoint with bytes that follow from their content's number, or checks them.
fn each_byte(endpoint: &Endpoint, block: u32, tokens: u32, mut each: impl FnMut(&mut u8)) {
    let layout = endpoint.layout();
    layout.geometry().canonical_spans(block, tokens, &mut |at, bytes| {
        let start = layout.location_at(at).unwrap().as_host().unwrap();
        let bytes = usize::try_from(bytes).unwrap();
        // SAFETY: within the layout's memory, which no job uses meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) };
        bytes.iter_mut().for_each(&mut each);
    });
}

pub fn fill(endpoint: &Endpoint, block: u32, number: usize) {
    let bytes = usize::try_from(endpoint.layout().geometry().block_bytes().get()).unwrap();
    let mut content = content(&key(number), bytes).into_iter();
    each_byte(endpoint, block, u32::MAX, |byte| *byte = content.next().unwrap());
}

pub fn bytes_of(endpoint: &Endpoint, block: u32, tokens: u32) -> Vec<u8> {
    let mut found = Vec::new();
    each_byte(endpoint, block, tokens, |byte| found.push(*byte));
    found
}

/// Blocks of an endpoint, by way of both tiers, in whole and in part, also after a restart.
fn endpoints_come_back(policy: WritePolicy, tier: impl Fn() -> Option<MemoryTier>) {
    let directory = tempfile::tempdir().unwrap();
    let engine = Endpoint::new(engine_layout(16)).unwrap();
    let block_bytes = engine.layout().geometry().block_bytes().get();
    let token_bytes = block_bytes / 8;
    let open = || {
        let mut builder = Store::builder()
            .group(BlockGroup::of_layout("kv", engine.layout()))
            .disk(disk(directory.path(), 64 * block_bytes.next_multiple_of(4096)))
            .namespace(namespace())
            .write_policy(policy);
        if let Some(tier) = tier() {
            builder = builder.memory_tier(tier);
        }
        builder.open().unwrap().0
    };
    let store = open();
    (0..4).for_each(|block| fill(&engine, block, usize::try_from(block).unwrap()));
    let whole = Blocks::new(&engine, &[0, 1, 2]);
    let outcome = store.put(&keys(0..3), whole, JobOptions::new(), ()).unwrap().wait();
    assert!(outcome.is_ok(), "{outcome:?}");
    let tail = Blocks::new(&engine, &[3]).tokens(&[5]);
    let outcome = store.put(&keys(3..4), tail, JobOptions::new(), ()).unwrap().wait();
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(outcome.bytes.get(), 5 * token_bytes);
    let check = |store: &Store| {
        (8..12).for_each(|block| fill(&engine, block, 99));
        let to = Blocks::new(&engine, &[8, 9, 10, 11]).tokens(&[8, 8, 8, 5]);
        let outcome = store.get(&keys(0..4), to, JobOptions::new(), ()).unwrap().wait();
        assert!(outcome.is_ok(), "{outcome:?}");
        for (number, block) in (0..3).zip(8..) {
            assert!(bytes_of(&engine, block, 8) == bytes_of(&engine, number, 8), "{number}");
        }
        assert!(bytes_of(&engine, 11, 5) == bytes_of(&engine, 3, 5));
        // The other tokens are not written.
        let untouched = Endpoint::new(engine_layout(1)).unwrap();
        fill(&untouched, 0, 99);
        let heads: Vec<u8> = bytes_of(&untouched, 0, 8);
        let rest = bytes_of(&engine, 11, 8);
        let layer_token = usize::try_from(token_bytes).unwrap() / 6;
        for piece in 0..6 {
            let begin = piece * 8 * layer_token + 5 * layer_token;
            assert!(rest[begin..begin + 3 * layer_token] == heads[begin..begin + 3 * layer_token]);
        }
        // As spans, in canonical order.
        let whole = usize::try_from(block_bytes).unwrap();
        let (outcome, spans) = get(store, &keys(1..2), whole, JobOptions::new());
        assert!(outcome.is_ok(), "{outcome:?}");
        assert!(spans[0] == bytes_of(&engine, 1, 8));
        let (outcome, spans) = get(store, &keys(3..4), whole * 5 / 8, JobOptions::new());
        assert!(outcome.is_ok(), "{outcome:?}");
        assert!(spans[0] == bytes_of(&engine, 3, 5));
    };
    check(&store);
    assert_at_rest(&store);
    drop(store);
    let store = open();
    check(&store);
    if tier().is_some() {
        let job = store.promote(&keys(0..4), TierId::new(0), JobOptions::new()).unwrap();
        assert!(job.wait().is_ok());
        check(&store);
        assert!(store.snapshot().tiers[0].hits > 0);
    }
    assert_at_rest(&store);
}

#[test]
fn blocks_of_endpoints_come_back_from_disk() {
    endpoints_come_back(WritePolicy::Through, || None);
}

#[test]
fn blocks_of_endpoints_come_back_through_a_tier_that_the_store_allocates() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        endpoints_come_back(policy, || Some(MemoryTier::system("host", ByteCount::kib(256))));
    }
}

#[test]
fn blocks_of_endpoints_come_back_through_a_tier_of_another_layout() {
    for policy in [WritePolicy::Through, WritePolicy::Back] {
        endpoints_come_back(policy, || {
            let endpoint = Endpoint::new(engine_layout(6)).unwrap();
            Some(MemoryTier::new("pinned", [endpoint]))
        });
    }
}

/// The jobs on tiers of 4 slots. Raise it for a longer search.
#[expect(clippy::disallowed_methods, reason = "a longer search is asked for")]
fn jobs_of_4_slots() -> usize {
    std::env::var("TERRANE_STORE_JOBS").map_or(2000, |count| count.parse().unwrap())
}

#[test]
fn tiers_of_4_slots_serve_8_threads_by_their_deadlines() {
    let jobs = jobs_of_4_slots();
    let directory = tempfile::tempdir().unwrap();
    let builder = builder(directory.path(), 8192, 4).host(host(4));
    let (store, _) = builder.write_policy(WritePolicy::Back).open().unwrap();
    let limit = Duration::from_secs(20);
    let worst = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                let store = store.clone();
                scope.spawn(move || {
                    let mut random = Seeded::new(thread);
                    let mut below = |most| random.below(most);
                    let mut worst = Duration::ZERO;
                    for _ in 0..jobs / 8 {
                        let first = below(12);
                        let keys: Vec<Vec<u8>> =
                            (0..=below(4)).map(|n| key((first + n) % 12)).collect();
                        let begun = Instant::now();
                        let options = JobOptions::new().deadline(begun + limit);
                        match below(4) {
                            0 => drop(submit_put(&store, &keys, BLOCK, options).wait()),
                            1 => {
                                drop(store.promote(&keys, TierId::new(0), options).unwrap().wait())
                            }
                            _ => {
                                let (outcome, blocks) = get(&store, &keys, BLOCK, options);
                                for ((key, block), result) in
                                    keys.iter().zip(blocks).zip(&outcome.results)
                                {
                                    match result {
                                        BlockResult::Done { .. } => {
                                            assert!(block == content(key, BLOCK));
                                        }
                                        BlockResult::Absent => {}
                                        other => panic!("{other}"),
                                    }
                                }
                            }
                        }
                        worst = worst.max(begun.elapsed());
                    }
                    worst
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap()
    });
    assert!(worst < limit, "{worst:?}");
    assert_at_rest(&store);
}

#[test]
fn a_durable_put_of_a_block_that_the_disk_tier_evicted_writes_it() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        let builder = builder(directory.path(), 8192, 4).host(host(16));
        builder.write_policy(WritePolicy::Back).open().unwrap().0
    };
    let store = open();
    put_ok(&store, &keys(0..1), BLOCK);
    assert!(store.sync().unwrap().wait().is_ok());
    for number in 1..12 {
        put_ok(&store, &keys(number..number + 1), BLOCK);
        // Memory may have more blocks than fit on disk.
        store.sync().unwrap().wait();
    }
    // The host tier has the block, and the disk tier of four slots does not.
    let durable = JobOptions::new().durable(true);
    let outcome = submit_put(&store, &keys(0..1), BLOCK, durable).wait();
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_at_rest(&store);
    drop(store);
    assert_eq!(found(&open(), &keys(0..1), BLOCK), [true]);
}

#[test]
fn a_tier_that_shrinks_writes_all_dirty_blocks_beyond_its_limit() {
    let directory = tempfile::tempdir().unwrap();
    let builder = builder(directory.path(), 8192, 256).host(host(200));
    let store = builder.write_policy(WritePolicy::Back).open().unwrap().0;
    put_ok(&store, &keys(0..90), BLOCK);
    assert_eq!(store.snapshot().tiers[0].groups[0].dirty, 90);
    store.resize(TierId::new(0), host(10)).unwrap();
    let until = soon();
    while store.snapshot().tiers[0].groups[0].blocks > 10 {
        assert!(Instant::now() < until, "{:?}", store.snapshot().tiers[0].groups[0]);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(found(&store, &keys(0..90), BLOCK), [true; 90]);
    assert_at_rest(&store);
}

#[test]
fn leases_in_the_tier_below_stop_no_write_back() {
    let directory = tempfile::tempdir().unwrap();
    let open = || builder(directory.path(), 4096, 64);
    let (store, _) = open().open().unwrap();
    put_ok(&store, &keys(0..64), 4096);
    drop(store);
    let host = ByteCount::new(64 * 4096);
    let (store, _) = open().host(host).write_policy(WritePolicy::Back).open().unwrap();
    let lease = store.acquire(0, &keys(0..40), Duration::from_secs(600));
    for number in 0..84 {
        put_ok(&store, &keys(1000 + number..1001 + number), 4096);
    }
    assert_at_rest(&store);
    // A write-back that gave up would leave the disk tier without these blocks.
    let is_on_disk =
        |why: Why| matches!(why, Why::Present { tiers, .. } if tiers.contains(&TierId::new(1)));
    let on_disk = keys(1000..1084).iter().filter(|key| is_on_disk(store.why(0, key))).count();
    assert_eq!(on_disk, 24, "each slot without a lease has one of them");
    drop(lease);
}

#[test]
fn a_promotion_of_more_blocks_than_slots_without_leases_goes_part_by_part() {
    let directory = tempfile::tempdir().unwrap();
    let host = ByteCount::new(8 * 4096);
    let (store, _) = builder(directory.path(), 4096, 64).host(host).open().unwrap();
    put_ok(&store, &keys(0..20), 4096);
    let leased = store.promote(&keys(0..5), TierId::new(0), JobOptions::new()).unwrap().wait();
    assert!(leased.results.iter().all(BlockResult::is_ok));
    let lease = store.acquire(0, &keys(0..5), Duration::from_secs(600));
    let promoted = store.promote(&keys(5..9), TierId::new(0), JobOptions::new()).unwrap().wait();
    assert!(promoted.results.iter().all(BlockResult::is_ok), "{:?}", promoted.results);
    drop(lease);
}
