//! A store with a disk tier alone.

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_store::{
    BlockGroup, BlockResult, Blocks, CompletionQueue, JobOptions, KeyError, NoRoom, Presence,
    Spans, Store, StoreError, TierId, Why,
};

use super::harness::{
    KIB, assert_at_rest, builder, content, disk, found, get, key, keys, namespace, open, put,
    put_ok, soon, submit_put,
};

const BLOCK: usize = 10_000;
const BLOCK_BYTES: u32 = 10_000;

#[test]
fn what_was_put_is_got() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    put_ok(&store, &keys(0..8), BLOCK);
    assert_eq!(found(&store, &keys(0..9), BLOCK), [vec![true; 8], vec![false]].concat());
    let mut presence = [Presence::Absent; 9];
    store.presence(0, &keys(0..9), &mut presence);
    let ready = Presence::Ready { tier: TierId::new(0), length: BLOCK_BYTES };
    assert_eq!(presence, [[ready; 8].as_slice(), &[Presence::Absent]].concat()[..]);
    assert_eq!(store.prefix(0, &keys(0..9)), 8);
    assert_eq!(store.prefix(0, &keys(3..9)), 5);
    assert_eq!(store.prefix(0, &keys(8..9)), 0);
    assert_eq!(store.prefix(1, &keys(0..9)), 0);
    assert_at_rest(&store);
}

#[test]
fn a_put_of_a_stored_key_copies_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    put_ok(&store, &keys(0..2), BLOCK);
    let again = put(&store, &keys(0..3), BLOCK);
    let [BlockResult::AlreadyStored, BlockResult::AlreadyStored, BlockResult::Done { bytes }] =
        again.results[..]
    else {
        panic!("{again:?}");
    };
    assert_eq!((bytes, again.bytes.get()), (BLOCK_BYTES, 10_000));
    assert_eq!(store.snapshot().tiers[0].stored, 3);
}

#[test]
fn a_key_that_is_put_twice_in_a_job_is_stored_once() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    let outcome = put(&store, &[key(1), key(1), key(2)], BLOCK);
    assert!(outcome.is_ok(), "{outcome:?}");
    let done = outcome.results.iter().filter(|result| matches!(result, BlockResult::Done { .. }));
    assert_eq!(done.count(), 2);
    assert_eq!(store.snapshot().tiers[0].groups[0].blocks, 2);
    assert_at_rest(&store);
}

#[test]
fn blocks_are_found_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    put_ok(&store, &keys(0..10), BLOCK);
    assert_eq!(store.close(soon()).left, 0);
    drop(store);
    let (store, recovery) = builder(directory.path(), BLOCK_BYTES, 16).open().unwrap();
    assert_eq!((recovery.found, recovery.torn, recovery.damaged), (10, 0, 0));
    assert!(found(&store, &keys(0..10), BLOCK).iter().all(|&found| found));
}

#[test]
fn removed_keys_stay_away_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    put_ok(&store, &keys(0..4), BLOCK);
    let job = store.remove(0, &keys(1..3)).unwrap();
    assert_eq!(store.prefix(0, &keys(0..4)), 1, "absent before the job ends");
    let outcome = job.wait();
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(store.why(0, &key(1)), Why::Removed);
    let outcome = store.remove(0, &[key(77)]).unwrap().wait();
    assert!(matches!(outcome.results[..], [BlockResult::Absent]), "{outcome:?}");
    drop(store);
    let store = open(directory.path(), BLOCK_BYTES, 16);
    assert_eq!(found(&store, &keys(0..4), BLOCK), [true, false, false, true]);
}

#[test]
fn a_cleared_store_is_empty_and_stays_so() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    put_ok(&store, &keys(0..4), BLOCK);
    assert!(store.clear().unwrap().wait().is_ok());
    assert_eq!(found(&store, &keys(0..4), BLOCK), [false; 4]);
    put_ok(&store, &keys(2..3), BLOCK);
    assert_at_rest(&store);
    drop(store);
    let store = open(directory.path(), BLOCK_BYTES, 16);
    assert_eq!(found(&store, &keys(0..4), BLOCK), [false, false, true, false]);
}

#[test]
fn a_full_tier_evicts_and_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 8);
    for number in 0..20 {
        put_ok(&store, &[key(number)], BLOCK);
    }
    let there = found(&store, &keys(0..20), BLOCK);
    assert_eq!(there.iter().filter(|&&found| found).count(), 8);
    let snapshot = store.snapshot();
    assert_eq!((snapshot.tiers[0].evictions, snapshot.tiers[0].hits), (12, 8));
    assert_eq!(snapshot.misses.evicted + snapshot.misses.absent, 12);
    assert!(snapshot.misses.evicted > 0);
    assert_eq!(store.why(0, &key(10)), Why::Evicted);
    assert_at_rest(&store);
}

#[test]
fn a_job_with_more_blocks_than_the_tier_is_told_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 4);
    put_ok(&store, &keys(0..4), BLOCK);
    let outcome = put(&store, &keys(10..15), BLOCK);
    for result in &outcome.results {
        let BlockResult::NoRoom(NoRoom::TierTooSmall { requested: 5, slots: 4, .. }) = result
        else {
            panic!("{result}")
        };
        let text = "slots requested at once: 5, slots of the tier for the group: 4; use smaller jobs or a \
                    larger tier";
        assert_eq!(result.to_string(), text);
    }
    // Nothing was evicted for it.
    assert_eq!(store.prefix(0, &keys(0..4)), 4);
    assert_at_rest(&store);
}

#[test]
fn leases_keep_blocks_until_they_drop_or_their_time_is_over() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 4);
    put_ok(&store, &keys(0..4), BLOCK);
    let lease = store.acquire(0, &keys(0..5), Duration::from_secs(600));
    assert_eq!((lease.prefix(), lease.pinned()), (4, 4));
    assert_eq!(lease.presence()[4], Presence::Absent);
    let Why::Present { is_pinned: true, .. } = store.why(0, &key(0)) else { panic!() };
    let begun = Instant::now();
    let outcome = put(&store, &keys(10..11), BLOCK);
    let [BlockResult::NoRoom(NoRoom::Pinned { requested: 1, slots: 4, pinned: 4, .. })] =
        outcome.results[..]
    else {
        panic!("{outcome:?}")
    };
    let text = "slots requested at once: 1, slots of the tier: 4, of which leases pin 4; release leases, or \
                use smaller jobs";
    assert_eq!(outcome.results[0].to_string(), text);
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(store.snapshot().tiers[0].groups[0].pinned, 4);
    drop(lease);
    put_ok(&store, &keys(10..11), BLOCK);

    // A lease that is leaked ends at its time.
    let lease = store.acquire(0, &keys(10..11), Duration::from_millis(20));
    assert_eq!(lease.pinned(), 1);
    #[expect(clippy::disallowed_methods, reason = "the test leaks it")]
    std::mem::forget(lease);
    while store.snapshot().tiers[0].groups[0].pinned > 0 {
        std::thread::yield_now();
    }
    assert_at_rest(&store);
}

#[test]
fn a_length_other_than_the_destinations_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 4);
    put_ok(&store, &keys(0..1), BLOCK);
    let (outcome, blocks) = get(&store, &keys(0..1), BLOCK - 1, JobOptions::new());
    let [BlockResult::WrongLength { stored, requested }] = outcome.results[..] else { panic!() };
    assert_eq!((stored, requested), (BLOCK_BYTES, BLOCK_BYTES - 1));
    assert!(blocks[0].iter().all(|&byte| byte == 0xee));
    assert_eq!(store.snapshot().misses.wrong_length, 1);
}

#[test]
fn wrong_requests_are_refused_with_the_guard() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 4);
    let mut memory = vec![1_u8; 40_000];
    let base = NonNull::from(&mut memory[..]).cast::<u8>();
    let blocks = |parts: &[(usize, usize)]| {
        let mut spans = Spans::new();
        for &(at, bytes) in parts {
            // SAFETY: within `memory`.
            spans.add(unsafe { base.add(at) }, bytes);
        }
        // SAFETY: `memory` outlives all jobs, which are refused.
        unsafe { Blocks::spans(spans) }
    };
    let options = JobOptions::new;
    let refused = store.put(&[key(1)], blocks(&[]), options(), 7).unwrap_err();
    assert_eq!(refused.guard, 7);
    assert!(matches!(refused.cause, StoreError::Counts { keys: 1, blocks: 0 }));
    let refused = store.put(&[key(1)], blocks(&[(0, 0)]), options(), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::BlockLength { index: 0, bytes: 0, .. }));
    let refused = store.put(&[key(1)], blocks(&[(0, BLOCK + 1)]), options(), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::BlockLength { bytes: 10_001, .. }));
    let refused = store.put(&[key(1)], blocks(&[(0, 9)]), options().group(1), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::NoSuchGroup { group: 1, groups: 1 }));
    let two = [key(1), key(2)];
    let refused = store.get(&two, blocks(&[(0, 90), (50, 90)]), options(), ()).unwrap_err();
    assert!(matches!(refused.cause, StoreError::DestinationNamedTwice { first: 0, second: 1 }));
    // A source may be named twice.
    let job = store.put(&two, blocks(&[(0, 90), (0, 90)]), options(), ()).unwrap();
    assert!(job.wait().is_ok());
    for (key, expected) in
        [(vec![], KeyError::Empty), (vec![9; 65_536], KeyError::TooLong { bytes: 65_536 })]
    {
        let keys = [b"good".to_vec(), key];
        let refused = store.put(&keys, blocks(&[(0, 9), (0, 9)]), options(), ()).unwrap_err();
        let StoreError::Key { index: 1, source } = refused.cause else { panic!() };
        assert_eq!(source, expected);
        let mut presence = [Presence::Writing; 2];
        store.presence(0, &keys, &mut presence);
        assert_eq!(presence, [Presence::Absent; 2]);
    }
    let error = store.promote(&two, TierId::new(0), options()).unwrap_err();
    assert!(matches!(error, StoreError::NotAMemoryTier { .. }), "{error}");
    assert_eq!(store.snapshot().refused_jobs, 7);
    assert_at_rest(&store);
    drop(memory);
}

#[test]
fn keys_of_65_535_bytes_and_blocks_of_one_byte_work() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 4);
    let long = [vec![3_u8; 65_535], b"x".to_vec()];
    put_ok(&store, &long, 1);
    drop(store);
    let store = builder(directory.path(), BLOCK_BYTES, 4).keep_keys(true).open().unwrap().0;
    assert_eq!(found(&store, &long, 1), [true, true]);
}

#[test]
fn blocks_of_several_spans_are_the_bytes_in_their_order() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 4);
    put_ok(&store, &keys(0..1), BLOCK);
    let mut parts: Vec<Vec<u8>> = [1, 4095, 1, 5000, 903].map(|bytes| vec![0; bytes]).into();
    let mut spans = Spans::new();
    spans.add_block(parts.iter_mut().map(|part| (NonNull::from(&mut part[..]).cast(), part.len())));
    // SAFETY: `parts` outlives the wait.
    let destination = unsafe { Blocks::spans(spans) };
    let outcome = store.get(&keys(0..1), destination, JobOptions::new(), ()).unwrap().wait();
    assert!(outcome.is_ok(), "{outcome:?}");
    assert_eq!(parts.concat(), content(&key(0), BLOCK));
}

#[test]
fn outcomes_go_to_the_queue_with_their_tags() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 64);
    let queue = CompletionQueue::new(4).unwrap();
    let mut jobs = Vec::new();
    for tag in 0..4 {
        let number = usize::try_from(tag).unwrap();
        let options = JobOptions::new().queue(&queue, tag);
        jobs.push(submit_put(&store, &[key(number)], BLOCK, options));
    }
    let mut blocks = [content(&key(9), BLOCK)];
    // SAFETY: the job is refused.
    let source = unsafe { Blocks::spans(super::harness::spans(&mut blocks)) };
    let options = JobOptions::new().queue(&queue, 9);
    let refused = store.put(&[key(9)], source, options, blocks).unwrap_err();
    assert!(matches!(refused.cause, StoreError::Queue(_)), "{refused}");
    let mut tags: Vec<u64> = (0..4).map(|_| queue.wait(Some(soon())).unwrap().tag).collect();
    tags.sort_unstable();
    assert_eq!(tags, [0, 1, 2, 3]);
    for job in jobs {
        let outcome = job.wait();
        assert!(outcome.results.is_empty() && outcome.is_ok());
    }
    let (outcome, _) = get(&store, &[key(9)], BLOCK, JobOptions::new().queue(&queue, 9));
    assert!(outcome.results.is_empty() && !outcome.is_ok());
    assert_at_rest(&store);
}

#[test]
fn a_guard_drops_before_the_outcome_is_seen() {
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 64);
    for number in 0..50 {
        let dropped = Arc::new(AtomicBool::new(false));
        let mut block = vec![content(&key(number), BLOCK)];
        // SAFETY: the guard has the block.
        let source = unsafe { Blocks::spans(super::harness::spans(&mut block)) };
        let guard = (Flag(Arc::clone(&dropped)), block);
        let job = store.put(&[key(number)], source, JobOptions::new(), guard).unwrap();
        assert!(job.wait().is_ok());
        assert!(dropped.load(Ordering::SeqCst));
    }
}

#[test]
fn groups_have_keys_of_their_own() {
    let directory = tempfile::tempdir().unwrap();
    let open = || {
        Store::builder()
            .group(BlockGroup::new("attention", 4 * KIB))
            .group(BlockGroup::new("state", 64 * KIB))
            .disk(disk(directory.path(), 4 << 20))
            .namespace(namespace())
            .open()
            .unwrap()
            .0
    };
    let store = open();
    let job = submit_put(&store, &keys(0..3), 65_536, JobOptions::new().group(1));
    assert!(job.wait().is_ok());
    put_ok(&store, &keys(0..1), 4096);
    assert_eq!((store.prefix(0, &keys(0..3)), store.prefix(1, &keys(0..3))), (1, 3));
    drop(store);
    let store = open();
    assert_eq!((store.prefix(0, &keys(0..3)), store.prefix(1, &keys(0..3))), (1, 3));
    let (outcome, blocks) = get(&store, &keys(2..3), 65_536, JobOptions::new().group(1));
    assert!(outcome.is_ok());
    assert!(blocks[0] == content(&key(2), 65_536));
}

#[test]
fn a_second_store_on_a_directory_names_the_first() {
    let directory = tempfile::tempdir().unwrap();
    let _store = open(directory.path(), BLOCK_BYTES, 4);
    let error = builder(directory.path(), BLOCK_BYTES, 4).open().unwrap_err();
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
}

#[test]
fn another_namespace_or_shape_is_refused_with_the_difference() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path(), BLOCK_BYTES, 4));
    let other = terrane_store::disk::Namespace::new("model", [("model", "qwen")]).unwrap();
    let error = builder(directory.path(), BLOCK_BYTES, 4).namespace(other).open().unwrap_err();
    assert!(error.to_string().contains("qwen"), "{error}");
    let error = builder(directory.path(), BLOCK_BYTES + 1, 4).open().unwrap_err();
    assert!(error.to_string().contains("fingerprint"), "{error}");
    drop(open(directory.path(), BLOCK_BYTES, 4));
}

#[test]
fn a_store_without_parts_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    let error = Store::builder().open().unwrap_err();
    assert!(matches!(error, StoreError::GroupOrTierCount { groups: 0, tiers: 0 }), "{error}");
    let group = || Store::builder().group(BlockGroup::new("kv", 4096));
    let error = group().open().unwrap_err();
    assert!(matches!(error, StoreError::GroupOrTierCount { groups: 1, tiers: 0 }), "{error}");
    let no_name = group().disk(disk(directory.path(), 1 << 20)).open().unwrap_err();
    assert!(matches!(no_name, StoreError::NoNamespace));
    for bytes in [0, 4095] {
        let error = group().disk(disk(directory.path(), bytes)).namespace(namespace()).open();
        assert!(matches!(error.unwrap_err(), StoreError::TierTooSmall { group: 0, .. }));
    }
    let empty = Store::builder().group(BlockGroup::new("kv", 0)).disk(disk(directory.path(), 9));
    assert!(matches!(empty.open().unwrap_err(), StoreError::BlockLength { .. }));
}

#[test]
fn groups_share_a_tier_by_weight() {
    let directory = tempfile::tempdir().unwrap();
    let open = |weights: [u32; 2]| {
        let [pages, index] = weights;
        Store::builder()
            .group(BlockGroup::new("kv", 61_440).weight(pages))
            .group(BlockGroup::new("index", 4096).weight(index))
            .disk(disk(directory.path(), 1 << 20))
            .host(ByteCount::new(1 << 19))
            .namespace(namespace())
            .open()
    };
    let slots = |store: &Store| -> Vec<Vec<usize>> {
        let tiers = store.snapshot().tiers;
        tiers.iter().map(|tier| tier.groups.iter().map(|group| group.slots).collect()).collect()
    };
    let (store, _) = open([15, 1]).unwrap();
    assert_eq!(slots(&store), [[8, 8], [16, 16]]);
    store.resize(TierId::new(1), ByteCount::new(1 << 18)).unwrap();
    assert_eq!(slots(&store), [[8, 8], [4, 4]]);
    drop(store);
    let (store, _) = open([1, 1]).unwrap();
    assert_eq!(slots(&store), [[4, 64], [8, 128]]);
    drop(store);
    for (weights, refused) in [([1, 0], 1), ([0, 1], 0), ([0, 0], 0)] {
        let error = open(weights).unwrap_err();
        assert!(
            matches!(error, StoreError::TierTooSmall { group, .. } if group == refused),
            "{error}"
        );
    }
}

#[test]
fn a_removed_key_stays_absent_though_several_puts_of_it_are_in_flight() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    for number in 0..50 {
        let keys = keys(number..number + 1);
        let puts: Vec<_> =
            (0..3).map(|_| submit_put(&store, &keys, BLOCK, JobOptions::new())).collect();
        let removal = store.remove(0, &keys).unwrap();
        for put in puts {
            assert!(put.wait().results[0].is_ok());
        }
        removal.wait();
        assert_eq!(store.prefix(0, &keys), 0, "round {number}");
    }
    drop(store);
    assert_eq!(open(directory.path(), BLOCK_BYTES, 16).snapshot().tiers[0].groups[0].blocks, 0);
}

#[test]
fn a_closed_store_refuses_jobs() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 4);
    put_ok(&store, &keys(0..1), BLOCK);
    let clone = store.clone();
    assert_eq!(store.close(soon()).left, 0);
    let refused = clone.sync().unwrap_err();
    assert!(matches!(refused, StoreError::Closed));
    assert_eq!(clone.close(soon()).left, 0);
    assert_eq!(clone.prefix(0, &keys(0..1)), 1);
}

#[test]
fn syncs_and_durable_puts_end() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path(), BLOCK_BYTES, 16);
    let job = submit_put(&store, &keys(0..4), BLOCK, JobOptions::new().durable(true));
    assert!(job.wait().is_ok());
    let catalog = store.snapshot().catalog.unwrap();
    assert!(catalog.durable + 1 >= catalog.next_sequence - 1, "{catalog:?}");
    assert!(store.sync().unwrap().wait().is_ok());
}

#[test]
fn short_sessions_do_not_leave_journals_without_end() {
    let directory = tempfile::tempdir().unwrap();
    let journals = || journals(directory.path());
    for session in 0..17 {
        let store = open(directory.path(), 4096, 32);
        put_ok(&store, &[key(session)], 4096);
        drop(store);
        assert_eq!(journals(), session + 1);
    }
    // A close has time for the checkpoint that the opening asked for.
    drop(open(directory.path(), 4096, 32));
    assert_eq!(journals(), 1);
    let store = open(directory.path(), 4096, 32);
    assert_eq!(found(&store, &keys(0..18), 4096), [vec![true; 17], vec![false]].concat());
    assert_eq!(journals(), 2);
}

/// The number of journals of a store.
fn journals(directory: &Path) -> usize {
    let names = std::fs::read_dir(directory.join("model")).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    names.map(name).filter(|name| name.to_string_lossy().starts_with("journal")).count()
}

#[test]
fn sessions_without_a_record_and_openings_that_fail_leave_no_journal() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    put_ok(&open(path, 4096, 32), &keys(0..4), 4096);
    assert_eq!(journals(path), 1);
    for is_read_only in [false, true] {
        for _ in 0..3 {
            let tier = disk(path, 32 * 4096).read_only(is_read_only);
            let (store, recovery) = builder(path, 4096, 32).disk(tier).open().unwrap();
            assert_eq!((recovery.found, journals(path)), (4, 2));
            assert_eq!(found(&store, &keys(0..4), 4096), [true; 4]);
            drop(store);
            assert_eq!(journals(path), 1);
        }
    }
    // The catalog is opened before the slab file, which is none.
    let (slab, aside) = (path.join("model/slab.0.000"), path.join("aside"));
    std::fs::rename(&slab, &aside).unwrap();
    std::fs::create_dir(&slab).unwrap();
    assert!(builder(path, 4096, 32).open().is_err());
    assert_eq!(journals(path), 1);
    std::fs::remove_dir(&slab).unwrap();
    std::fs::rename(&aside, &slab).unwrap();
    let store = open(path, 4096, 32);
    assert!(store.remove(0, &keys(0..1)).unwrap().wait().is_ok());
    drop(store);
    assert_eq!(journals(path), 2);
    let store = open(path, 4096, 32);
    assert_eq!(found(&store, &keys(0..4), 4096), [false, true, true, true]);
}
