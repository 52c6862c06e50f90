//! One budget over real device, pinned and system memory and disk.

use terrane_core::{Allocate, AllocateError, ByteCount, Memory, RegionRequest, StorageKind};
use terrane_cuda::{DeviceAllocator, PinnedAllocator, PinnedOptions};
use terrane_pool::adaptors::{Adapt, AnyUpstream, Budget, Erased};
use terrane_pool::{Pool, PoolOptions};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};

use crate::needs::{LITTLE, device};

#[test]
fn device_pinned_system_and_disk_share_one_budget() {
    let name = "device_pinned_system_and_disk_share_one_budget";
    let Some(context) = device(name, LITTLE) else { return };
    let node = Budget::new("node", ByteCount::mib(8));
    let host = node.child("host", ByteCount::mib(6));
    let directory = tempfile::tempdir().unwrap();
    let disk = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let system = SystemAllocator::new(SystemOptions::default());
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let pinned = pinned.limited(host.child("pinned", ByteCount::mib(4)));
    let tiers: [AnyUpstream; 4] = [
        Erased::shared(DeviceAllocator::new(&context).limited(node.clone())),
        Erased::shared(Pool::new(pinned, PoolOptions::default()).unwrap()),
        Erased::shared(system.limited(host.child("system", ByteCount::mib(4)))),
        Erased::shared(disk.limited(node.clone())),
    ];
    let [device, pinned, system, disk] = &tiers;
    let kinds = tiers.each_ref().map(Allocate::kind);
    let expected = [context.kind(), StorageKind::Pinned, StorageKind::System, StorageKind::Disk];
    assert_eq!(kinds, expected);
    let of = |mib| RegionRequest::new(ByteCount::mib(mib)).labelled("kv");

    let kept = [pinned.allocate(&of(4)).unwrap(), system.allocate(&of(2)).unwrap()];
    assert_eq!(host.live(), ByteCount::mib(6));
    // The host's share is used up. The node's share is not.
    let refused = system.allocate(&of(1)).unwrap_err();
    assert!(refused.is_exhaustion(), "{refused}");
    let file = disk.allocate(&of(1)).unwrap();
    let on_device = device.allocate(&of(1)).unwrap();
    assert_eq!(node.live(), ByteCount::mib(8));
    let usage = context.usage();
    assert_eq!(
        (usage.device.bytes, usage.registered.bytes),
        (ByteCount::mib(1), ByteCount::mib(4))
    );
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
    // A reservation excludes other allocations before anything is allocated.
    drop(file);
    let reserved = node.reserve(ByteCount::mib(1)).unwrap();
    assert!(device.allocate(&of(1)).is_err());
    drop(reserved);
    // Memory that one tier frees is available to another.
    assert_eq!(device.allocate(&of(1)).unwrap().length(), ByteCount::mib(1));
    drop((kept, on_device));
    drop(tiers);
    assert_eq!((node.live(), host.live()), (ByteCount::ZERO, ByteCount::ZERO));
    assert_eq!(node.peak(), ByteCount::mib(8));
    let after = context.usage();
    assert_eq!((after.device.count, after.registered.count), (0, 0));
}
