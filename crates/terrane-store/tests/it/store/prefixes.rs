//! The order of a job's keys is that of a prefix: its tail is evicted before its head.

use std::time::Duration;

use terrane_core::ByteCount;
use terrane_store::{BlockGroup, EvictionKind, JobOptions, Presence, Store, TierId, WritePolicy};
use terrane_testkit::random::Seeded;

use super::harness::{assert_at_rest, builder, found, keys, put_ok, submit_put};

const BLOCK: usize = 64;

/// The bytes between two blocks of a host tier.
const STRIDE: u64 = 4096;

const POLICIES: [EvictionKind; 2] = [EvictionKind::S3Fifo, EvictionKind::Lru];

fn in_memory(eviction: EvictionKind, slots: u64) -> Store {
    let group = BlockGroup::new("kv", 64);
    let builder = Store::builder().group(group).host(ByteCount::new(STRIDE * slots));
    builder.eviction(eviction).open().unwrap().0
}

#[test]
fn the_tail_of_a_prefix_is_evicted_before_its_head() {
    for eviction in POLICIES {
        let directory = tempfile::tempdir().unwrap();
        let on_disk = builder(directory.path(), 64, 8).eviction(eviction).open().unwrap().0;
        for store in [in_memory(eviction, 8), on_disk] {
            put_ok(&store, &keys(0..8), BLOCK);
            for number in 0..5 {
                put_ok(&store, &keys(100 + number..101 + number), BLOCK);
                // S3-FIFO evicts from its small queue, which all of them are in.
                assert_eq!(store.prefix(0, &keys(0..8)), 7 - number, "{eviction:?}");
            }
            assert_at_rest(&store);
        }
    }
}

#[test]
fn a_use_of_a_prefix_keeps_its_head_longest() {
    let store = in_memory(EvictionKind::Lru, 8);
    put_ok(&store, &keys(0..4), BLOCK);
    put_ok(&store, &keys(10..14), BLOCK);
    let uses: [&dyn Fn(); 3] = [
        &|| assert_eq!(found(&store, &keys(0..4), BLOCK), [true; 4]),
        &|| store.touch(0, &keys(0..4)),
        &|| put_ok(&store, &keys(0..4), BLOCK),
    ];
    for (round, use_prefix) in uses.into_iter().enumerate() {
        use_prefix();
        // Four for the other prefix or the blocks before, and two for the tail.
        put_ok(&store, &keys(100 + 10 * round..106 + 10 * round), BLOCK);
        assert_eq!(store.prefix(0, &keys(0..4)), 2);
        put_ok(&store, &keys(0..4), BLOCK);
        put_ok(&store, &keys(200 + 10 * round..204 + 10 * round), BLOCK);
        assert_eq!(store.prefix(0, &keys(0..4)), 4);
    }
    assert_at_rest(&store);
}

#[test]
fn a_job_in_several_parts_keeps_the_head_of_its_prefix_longest() {
    for eviction in POLICIES {
        let directory = tempfile::tempdir().unwrap();
        // A part has as many blocks as half of the tier that they come to.
        let on_disk = || builder(directory.path(), 64, 8).eviction(eviction);
        let with_host = |slots| on_disk().host(ByteCount::new(STRIDE * slots));
        let (store, _) = with_host(16).write_policy(WritePolicy::Back).open().unwrap();
        for written in [keys(0..8), keys(100..101)] {
            let durable = JobOptions::new().durable(true);
            assert!(submit_put(&store, &written, BLOCK, durable).wait().is_ok());
        }
        drop(store);
        assert_eq!(on_disk().open().unwrap().0.prefix(0, &keys(0..8)), 7, "{eviction:?}");

        let (store, _) = with_host(6).open().unwrap();
        let promote = |keys: &[Vec<u8>]| {
            let promoted = store.promote(keys, TierId::new(0), JobOptions::new()).unwrap().wait();
            assert!(promoted.is_ok(), "{promoted:?}");
        };
        promote(&keys(0..6));
        promote(&keys(100..101));
        let mut presence = [Presence::Absent; 6];
        store.presence(0, &keys(0..6), &mut presence);
        let is_in_memory = |found: &Presence| matches!(found, Presence::Ready { tier, .. } if *tier == TierId::new(0));
        let in_memory = presence.iter().take_while(|found| is_in_memory(found)).count();
        assert_eq!(in_memory, 5, "{eviction:?} {presence:?}");
        assert_at_rest(&store);
    }
}

#[test]
fn leased_blocks_of_a_tail_stay() {
    for eviction in POLICIES {
        let store = in_memory(eviction, 8);
        put_ok(&store, &keys(0..8), BLOCK);
        let lease = store.acquire(0, &keys(6..8), Duration::from_secs(600));
        put_ok(&store, &keys(100..103), BLOCK);
        assert_eq!(found(&store, &keys(0..8), BLOCK), [1, 1, 1, 0, 0, 0, 1, 1].map(|is| is == 1));
        drop(lease);
        assert_at_rest(&store);
    }
}

/// The turns of conversations that begin with one of a few system prompts: the keys of each.
fn turns(count: usize) -> Vec<Vec<Vec<u8>>> {
    let mut random = Seeded::new(11);
    let mut open: Vec<(usize, usize)> = Vec::new();
    let turn = |number: usize| {
        let at = match random.below(4) {
            0 => None,
            // Recent conversations go on more often.
            _ => open.len().checked_sub(1 + random.below(40).min(random.below(40))),
        };
        let (conversation, length) = at.map_or((number, 0), |at| open.remove(at));
        let length = length + 4 + random.below(16);
        // A job of more blocks than the tier has would be refused.
        if length < 100 {
            open.push((conversation, length));
        }
        let prompt = (0..6).map(|block| format!("prompt {} {block}", conversation % 3));
        let own = (0..length).map(|block| format!("conversation {conversation} {block}"));
        prompt.chain(own).map(String::into_bytes).collect()
    };
    (0..count).map(turn).collect()
}

/// The blocks of leading keys that were there, among all. A turn gets them, and puts the others.
fn hit_ratio(store: &Store, turns: &[Vec<Vec<u8>>], keys_a_job: usize) -> f64 {
    let (mut hits, mut all) = (0_u32, 0_u32);
    for keys in turns {
        let (there, absent) = keys.split_at(store.prefix(0, keys));
        for keys in there.chunks(keys_a_job) {
            assert!(found(store, keys, BLOCK).into_iter().all(|found| found));
        }
        for keys in absent.chunks(keys_a_job) {
            put_ok(store, keys, BLOCK);
        }
        hits += u32::try_from(there.len()).unwrap();
        all += u32::try_from(keys.len()).unwrap();
    }
    f64::from(hits) / f64::from(all)
}

#[test]
fn prefixes_in_one_job_are_found_longer_than_blocks_in_jobs_of_their_own() {
    let turns = turns(1000);
    for eviction in POLICIES {
        for slots in [150, 400] {
            let [alone, together] = [1, usize::MAX]
                .map(|keys_a_job| hit_ratio(&in_memory(eviction, slots), &turns, keys_a_job));
            assert!(
                together > alone * 1.01,
                "{eviction:?} with {slots} slots: {together:.3} together, {alone:.3} alone"
            );
        }
    }
}
