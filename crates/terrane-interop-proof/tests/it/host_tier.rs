//! pegainfer's contract of a host tier: saves, hits, loads, eviction and errors.

use terrane::prelude::*;
use terrane::store::StoreError;

use crate::block_on::block_on;
use crate::contract::{HostTier, TierQuery};
use crate::rank::{Guard, Rank, SHAPE, hashes, name};
use crate::store_tier::StoreTier;

#[test]
fn saved_blocks_are_loaded_to_other_pages() {
    let rank = Rank::new(12);
    rank.save(&[1, 2, 3, 4, 5]).unwrap();
    assert_eq!(rank.has(&[1, 2, 3, 4, 5]), 5);
    rank.load(&[1, 2, 3, 4, 5], &[11, 0, 7, 3, 4]);
    // A block that is stored is not read again.
    rank.save(&[1, 2, 6]).unwrap();
    assert_eq!(rank.store.snapshot().already_stored, 2);
    rank.load(&[1, 2, 6], &[2, 1, 0]);
    // Nothing at all is a save, too.
    block_on(rank.tier.save(vec![], vec![], vec![])).unwrap();
    block_on(rank.tier.flush()).unwrap();
}

#[test]
fn a_hit_is_the_leading_blocks_of_the_prefix() {
    let rank = Rank::new(12);
    rank.save(&[1, 2, 4]).unwrap();
    assert_eq!(rank.has(&[1, 2, 3, 4]), 2);
    assert_eq!(rank.has(&[3, 1, 2]), 0);
    assert_eq!(rank.has(&[]), 0);
    // A request that cannot compute a miss waits for all blocks.
    assert_eq!(name(&rank.query(&[1, 2, 3], true)), "loading");
    assert_eq!(name(&rank.query(&[7], true)), "loading");
    assert_eq!(name(&rank.query(&[7], false)), "miss");
    rank.save(&[3]).unwrap();
    let TierQuery::Hit(hit) = rank.query(&[1, 2, 3], true) else { panic!("all blocks are there") };
    assert_eq!(hit.blocks, 3);
}

#[test]
fn a_full_tier_evicts_blocks_that_no_hit_pins() {
    let rank = Rank::new(4);
    rank.save(&[1, 2]).unwrap();
    let pinned = rank.hit(&[1, 2]);
    rank.save(&[3, 4]).unwrap();
    rank.save(&[5, 6]).unwrap();
    assert_eq!((rank.has(&[3]), rank.has(&[4]), rank.has(&[1, 2])), (0, 0, 2));
    rank.load(&[5, 6], &[8, 9]);
    // All blocks are pinned, so a save fails with the numbers. Its pages are free again.
    let others = rank.hit(&[5, 6]);
    let error = rank.save(&[7]).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("slots of the tier: 4, of which leases pin 4"), "{text}");
    assert_eq!(rank.has(&[7]), 0);
    rank.tier.release(others);
    rank.save(&[7]).unwrap();
    block_on(rank.tier.load(pinned, vec![10, 11])).unwrap();
    for (page, number) in [(10, 1), (11, 2)] {
        assert!(rank.engine.read(page).unwrap() == rank.engine.content(number));
    }
    rank.save(&[8, 9, 10]).unwrap();
    assert_eq!(rank.has(&[1]), 0, "a load ends the pins");
}

/// A save is split into jobs that fit. The head of the prefix stays.
#[test]
fn a_save_of_more_blocks_than_the_tier_has_keeps_the_head() {
    let rank = Rank::new(4);
    rank.save(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).unwrap();
    assert!(rank.has(&[1, 2, 3, 4, 5, 6]) >= 2);
    rank.load(&[1, 2], &[4, 3]);
}

#[test]
fn a_block_that_is_gone_is_an_error_and_the_others_are_loaded() {
    let rank = Rank::new(6);
    rank.save(&[1, 2, 3]).unwrap();
    let hit = rank.hit(&[1, 2, 3]);
    // Only a removal takes a block that a hit pins.
    rank.store.remove(0, &hashes(&[2])).unwrap().wait();
    let error = block_on(rank.tier.load(hit, vec![5, 6, 7])).unwrap_err();
    assert_eq!(format!("{error:#}"), "the load failed: absent");
    assert!(rank.engine.read(6).unwrap() == rank.engine.content(0));
    assert_eq!(rank.has(&[1, 2, 3]), 1);
    assert_eq!(rank.store.snapshot().tiers[0].groups[0].pinned, 0, "an error ends the pins");
}

#[test]
fn hostile_pages_are_errors_and_end_the_pins() {
    let rank = Rank::new(6);
    rank.save(&[1, 2]).unwrap();
    let load = |pages: Vec<i32>| {
        let error = block_on(rank.tier.load(rank.hit(&[1, 2]), pages)).unwrap_err();
        assert_eq!(rank.store.snapshot().tiers[0].groups[0].pinned, 0);
        for page in 0..SHAPE.1 {
            assert!(rank.engine.read(page).unwrap() == rank.engine.content(0), "page {page}");
        }
        error
    };
    for pages in [vec![], vec![0], vec![0, 1, 2]] {
        let error = load(pages).to_string();
        assert!(error.contains("pages for 2 blocks"), "{error}");
    }
    assert_eq!(load(vec![0, -1]).to_string(), "page -1 does not exist");
    let is = |error: anyhow::Error, found: fn(&StoreError) -> bool| {
        assert!(error.downcast_ref::<StoreError>().is_some_and(found), "{error:#}");
    };
    is(load(vec![0, 12]), |error| matches!(error, StoreError::NoSuchBlock { block: 12, .. }));
    assert_eq!(load(vec![3, 3]).to_string(), "page 3 is named twice; name each page once");

    let guard = Guard::default();
    let save = |pages: Vec<i32>, hashes: Vec<Vec<u8>>| {
        let guards = pages.iter().map(|_| guard.take()).collect();
        let error = block_on(rank.tier.save(pages, hashes, guards)).unwrap_err();
        assert_eq!(guard.held(), 0);
        error
    };
    let error = save(vec![0, 1], hashes(&[8])).to_string();
    assert_eq!(error, "2 pages for 1 blocks; pass one page for each block");
    is(save(vec![12], hashes(&[8])), |error| matches!(error, StoreError::NoSuchBlock { .. }));
    is(save(vec![0], vec![vec![]]), |error| matches!(error, StoreError::Key { index: 0, .. }));
    block_on(rank.tier.flush()).unwrap();
    assert_eq!(rank.has(&[8]), 0);
}

/// Blocks that left host memory are read from disk, also after a restart.
#[test]
fn blocks_on_disk_are_loaded_and_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let manager = TransferManager::with_default_engines().unwrap();
    let rank = Rank::with(None, &manager, 4, Some(directory.path()));
    rank.save(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    assert_eq!(rank.has(&[1, 2, 3, 4, 5, 6, 7, 8]), 8);
    rank.load(&[1, 2, 3, 4, 5, 6, 7, 8], &[9, 8, 7, 6, 5, 4, 3, 2]);
    // Blocks in memory and on disk may not have one page.
    let hit = rank.hit(&[1, 2, 3, 4, 5, 6, 7, 8]);
    let error = block_on(rank.tier.load(hit, vec![0, 1, 2, 3, 4, 5, 6, 0])).unwrap_err();
    assert_eq!(error.to_string(), "page 0 is named twice; name each page once");
    drop(rank);
    let rank = Rank::with(None, &manager, 4, Some(directory.path()));
    rank.load(&[1, 2, 3, 4, 5, 6, 7, 8], &[0, 2, 4, 6, 8, 10, 1, 3]);
}

/// A load writes to the rank's cache and to those of devices with the same blocks.
#[test]
fn mirrors_get_every_load_and_ranks_share_a_store() {
    let rank = Rank::new(6);
    rank.check_mirror_on(None);
    // The other tier has the blocks as well.
    assert_eq!(rank.has(&[1, 2, 3]), 3);
    assert!(StoreTier::new(rank.store.clone(), vec![]).is_err());
}
