//! Layouts whose memory comes from a pool, and returns to it after the last use.

use terrane::core::ByteCount;
use terrane::layout::LayoutKind;
use terrane::pool::{Pool, PoolOptions, SizeClasses};
use terrane::storage::{SystemAllocator, SystemOptions};
use terrane::transfer::{Transfer, TransferManager};
use terrane_testkit::pattern::Pattern;

use crate::support::*;

const BLOCKS: u32 = 256;

#[test]
fn the_memory_of_a_layout_returns_to_its_pool_after_the_last_transfer() {
    // Without magazines, memory that an engine's thread frees is available to all threads.
    let options = PoolOptions {
        classes: SizeClasses::PowerOfTwo,
        magazine_depth: 0,
        ..PoolOptions::default()
    };
    let pool = Pool::new(SystemAllocator::new(SystemOptions::default()), options).unwrap();
    let manager = TransferManager::with_default_engines().unwrap();
    let host = endpoint(BLOCKS, LayoutKind::FullyContiguous, &pool);
    let pattern = Pattern::new(5);

    let staging = endpoint(BLOCKS, LayoutKind::ALL[1], &pool);
    pattern.fill(&staging).unwrap();
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    let transfer = Transfer::new(&staging, &host).blocks(&blocks, &blocks);
    let completion = manager.submit(transfer, ()).unwrap();
    // Now only the transfer keeps the staging blocks alive.
    drop(staging);
    completion.wait().result.unwrap();
    pattern.verify(&host).unwrap().assert_clean("what was staged");

    let before = pool.snapshot();
    let again = endpoint(BLOCKS, LayoutKind::ALL[1], &pool);
    let after = pool.snapshot();
    assert_eq!(after.held, before.held, "the memory of the staging blocks is reused");
    assert!(after.cached < before.cached && after.live > before.live, "{before:?} {after:?}");
    drop((again, host));
    assert_eq!(pool.snapshot().live, ByteCount::ZERO);
    pool.clear();
    assert_eq!(pool.snapshot().held, ByteCount::ZERO);
}
