//! One budget over memory and disk.

use terrane::core::{AllocateError, ByteCount};
use terrane::layout::{LayoutError, LayoutKind};
use terrane::pool::adaptors::{Budget, Limit};
use terrane::storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane::transfer::TransferManager;
use terrane_testkit::pattern::Pattern;

use crate::support::*;

fn refusal(error: &LayoutError) -> &AllocateError {
    match error {
        LayoutError::Allocate { source } => source,
        other => panic!("refused by something other than an allocator: {other}"),
    }
}

#[test]
fn tiers_share_a_budget_and_freed_bytes_are_available_to_both() {
    let directory = tempfile::tempdir().unwrap();
    let all = Budget::new("cache", ByteCount::mib(16));
    let memory = Limit::new(
        SystemAllocator::new(SystemOptions::default()),
        all.child("memory", ByteCount::mib(12)),
    );
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let disk = Limit::new(files, all.child("disk", ByteCount::mib(16)));

    // 160 blocks of 48 KiB are 7.5 MiB. One such layout fits into each tier; a second one fits into
    // neither.
    let compute = endpoint(160, LayoutKind::ALL[2], &memory);
    let tier = endpoint(160, LayoutKind::FullyContiguous, &disk);
    let error = layout(160, LayoutKind::FullyContiguous, &disk).unwrap_err();
    let refused = refusal(&error);
    assert!(matches!(refused, AllocateError::OverBudget { .. }), "{refused:?}");
    assert!(refused.is_exhaustion());
    assert_eq!(all.live(), ByteCount::mib(15));

    let manager = TransferManager::with_default_engines().unwrap();
    let pattern = Pattern::new(1);
    pattern.fill(&compute).unwrap();
    let blocks: Vec<u32> = (0..160).collect();
    let report = copy_blocks(&manager, (&compute, &blocks), (&tier, &blocks));
    assert_eq!(report.explanation.bytes, config(160).total_bytes());
    pattern.verify(&tier).unwrap().assert_clean("the bytes that were written to disk");

    drop(compute);
    assert_eq!(all.live(), ByteCount::new(7_864_320));
    let second = endpoint(160, LayoutKind::FullyContiguous, &disk);
    let error = layout(160, LayoutKind::FullyContiguous, &memory).unwrap_err();
    assert!(refusal(&error).is_exhaustion(), "{error}");
    drop((tier, second));
    assert_eq!(all.live(), ByteCount::ZERO);
}
