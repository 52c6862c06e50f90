//! pegainfer's host tier over arenas on a device.

use terrane::prelude::*;

use crate::arenas::{ArenaMemory, adopt_arenas};
use crate::block_on::block_on;
use crate::contract::{ArenaSpec, HostTier};
use crate::needs::{LITTLE, device, two_devices};
use crate::rank::{Guard, Rank, name};

fn manager<'a>(contexts: impl IntoIterator<Item = &'a Context>) -> TransferManager {
    TransferManager::builder().devices(contexts).unwrap().build()
}

#[test]
fn pages_of_a_device_are_saved_to_pinned_memory_and_loaded() {
    let test = "host_tier::pages_of_a_device_are_saved_to_pinned_memory_and_loaded";
    let Some(context) = device(test, LITTLE) else { return };
    let rank = Rank::with(Some(&context), &manager([&context]), 6, None);
    assert!(rank.cache.kind().is_device());
    rank.save(&[1, 2, 3, 4]).unwrap();
    rank.load(&[1, 2, 3, 4], &[11, 0, 7, 3]);
    // Eviction, and a hit that keeps its blocks.
    let hit = rank.hit(&[1, 2]);
    rank.save(&[5, 6, 7, 8]).unwrap();
    assert_eq!((rank.has(&[1, 2]), rank.has(&[3]), rank.has(&[5, 6, 7, 8])), (2, 0, 4));
    rank.tier.release(hit);
    assert_eq!(name(&rank.query(&[9], false)), "miss");
    let error = block_on(rank.tier.load(rank.hit(&[5]), vec![12])).unwrap_err();
    assert!(format!("{error:#}").contains("block 12"), "{error:#}");
    assert_eq!(context.lost(), None);
}

/// Blocks on disk pass through pinned memory, which has fewer slots than the hit has blocks.
#[test]
fn pages_of_a_device_are_loaded_from_disk() {
    let test = "host_tier::pages_of_a_device_are_loaded_from_disk";
    let Some(context) = device(test, LITTLE) else { return };
    let (directory, manager) = (tempfile::tempdir().unwrap(), manager([&context]));
    let rank = Rank::with(Some(&context), &manager, 3, Some(directory.path()));
    rank.save(&[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    rank.load(&[1, 2, 3, 4, 5, 6, 7, 8], &[9, 8, 7, 6, 5, 4, 3, 2]);
    drop(rank);
    let rank = Rank::with(Some(&context), &manager, 3, Some(directory.path()));
    rank.load(&[1, 2, 3, 4, 5, 6, 7, 8], &[0, 2, 4, 6, 8, 10, 1, 3]);
    assert_eq!(context.lost(), None);
}

#[test]
fn dropped_futures_leave_the_pages_of_a_device_right() {
    let test = "host_tier::dropped_futures_leave_the_pages_of_a_device_right";
    let Some(context) = device(test, LITTLE) else { return };
    let rank = Rank::with(Some(&context), &manager([&context]), 8, None);
    let guard = Guard::default();
    drop(rank.start_save(&[1, 2, 3], &guard));
    block_on(rank.tier.flush()).unwrap();
    assert_eq!(guard.held(), 0);
    drop(rank.tier.load(rank.hit(&[1, 2, 3]), vec![4, 5, 6]));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    assert_eq!(rank.store.drain(deadline).left, 0);
    for (page, number) in [(4, 1), (5, 2), (6, 3)] {
        assert!(rank.engine.read(page).unwrap() == rank.engine.content(number), "page {page}");
    }
}

#[test]
fn a_load_reaches_the_mirrors_on_other_devices() {
    let test = "host_tier::a_load_reaches_the_mirrors_on_other_devices";
    let Some([context, peer]) = two_devices(test, LITTLE) else { return };
    let rank = Rank::with(Some(&context), &manager([&context, &peer]), 6, None);
    rank.check_mirror_on(Some(&peer));
}

/// The driver is asked about each arena, so an address outside of the device's memory is an error.
#[test]
fn arenas_outside_the_device_are_refused() {
    let test = "host_tier::arenas_outside_the_device_are_refused";
    let Some(context) = device(test, LITTLE) else { return };
    let host = vec![0_u8; 4096];
    let arena = |address: u64| ArenaSpec {
        name: "layer 0".into(),
        base_device_ptr: address,
        size_bytes: 4096,
        num_blocks: 4,
        segment_bytes: 512,
        segments: 2,
        kv_stride_bytes: 512,
        block_stride_bytes: 1024,
    };
    for address in [0, 8, u64::MAX - 8, u64::try_from(host.as_ptr().addr()).unwrap()] {
        let memory = ArenaMemory::Device(&context);
        // SAFETY: the arena is refused.
        let error = unsafe { adopt_arenas(memory, &[arena(address)], ()) }.unwrap_err();
        assert!(format!("{error:#}").contains("layer 0"), "{error:#}");
    }
}
