//! One budget over all tiers.

use terrane::core::{Allocate, AllocateError, ByteCount, RegionRequest, Span, StorageKind};
use terrane::pool::adaptors::{Adapt, AnyUpstream, Budget, Erased};
use terrane::pool::{Pool, PoolOptions};
use terrane::storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::simulated::{Simulated, SimulatedOptions};

/// Device and pinned memory are simulated. Pooled system memory and the disk are real.
#[test]
fn device_pinned_system_and_disk_share_one_budget() {
    let node = Budget::new("node", ByteCount::mib(8));
    let host = node.child("host", ByteCount::mib(6));
    let directory = tempfile::tempdir().unwrap();
    let disk = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let system = SystemAllocator::new(SystemOptions::default());
    let pool =
        Pool::new(system.limited(host.child("system", ByteCount::mib(4))), PoolOptions::default());
    let tiers: [AnyUpstream; 4] = [
        Erased::shared(Simulated::new(SimulatedOptions::default()).limited(node.clone())),
        Erased::shared(HeapAllocator::pinned().limited(host.child("pinned", ByteCount::mib(4)))),
        Erased::shared(pool.unwrap()),
        Erased::shared(disk.limited(node.clone())),
    ];
    let [device, pinned, system, disk] = &tiers;
    let of = |mib| RegionRequest::new(ByteCount::mib(mib)).labelled("kv");

    let kept = [pinned.allocate(&of(4)).unwrap(), system.allocate(&of(2)).unwrap()];
    assert_eq!(host.live(), ByteCount::mib(6));
    // The host's budget is used up, but the node's is not.
    let refused = system.allocate(&of(1)).unwrap_err();
    assert!(refused.is_exhaustion(), "{refused}");
    let file = disk.allocate(&of(1)).unwrap();
    let on_device = device.allocate(&of(1)).unwrap();
    assert_eq!((Span::of(&file).kind, node.live()), (StorageKind::Disk, ByteCount::mib(8)));
    for tier in [device, disk] {
        match tier.allocate(&of(1)).unwrap_err() {
            AllocateError::OverBudget { requested, live, limit, label, .. } => {
                let expected = [ByteCount::mib(1), ByteCount::mib(8), ByteCount::mib(8)];
                assert_eq!([requested, live, limit], expected);
                assert_eq!(label.as_str(), "kv");
            }
            other => panic!("{other}"),
        }
    }
    // The bytes that one tier frees are available to another.
    drop(file);
    drop(device.allocate(&of(1)).unwrap());
    drop((kept, on_device));
    drop(tiers);
    assert_eq!((node.live(), host.live()), (ByteCount::ZERO, ByteCount::ZERO));
    assert_eq!(node.peak(), ByteCount::mib(8));
}
