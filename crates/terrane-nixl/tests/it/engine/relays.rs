//! Transfers through memory that a backend accepts, if no backend accepts both ends.

use std::sync::Arc;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_nixl::{NixlEngineOptions, RegisteredAllocator};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions, RelayEngine, RelayOptions};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::support::*;

#[test]
fn a_file_is_copied_to_a_peer_through_registered_memory() {
    let pair = Pair::new();
    let nixl = pair.engine(NixlEngineOptions::default());
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let bounce = RegisteredAllocator::new(HeapAllocator::pinned(), pair.here.clone());
    let options = RelayOptions { slots: 2, slot_bytes: ByteCount::kib(8) };
    let relay = RelayEngine::new(disk.clone(), nixl.clone(), bounce, &options).unwrap();
    let manager = TransferManager::new([nixl, disk as _, Arc::new(relay) as _]);

    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = Endpoint::new(registered(&files, &pair.here, config(8), CONTIGUOUS)).unwrap();
    let remote = pair.remote(config(8), terrane_layout::LayoutKind::ALL[2]);
    let image = Image::scribble(&file, &PeersInProcess, 4);
    let mut expected = Image::of(&remote, &PeersInProcess);
    let blocks = [7, 2, 3, 4, 0];
    let transfer = || Transfer::new(&file, &remote).blocks(&blocks, &[0, 1, 2, 3, 4]);
    let explanation = manager.explain(&transfer()).unwrap();
    assert_eq!(explanation.engine, "relay");
    assert!(explanation.path().contains("UCX write"), "{explanation}");
    assert!(explanation.reason().contains("through pinned memory"), "{explanation}");

    let completion = manager.submit(transfer().notify(*b"five blocks"), ()).unwrap();
    let patience = Instant::now() + Duration::from_secs(120);
    let notifications = pair.there.wait_for_notifications(patience).unwrap();
    assert_eq!(
        notifications.iter().map(|notification| &notification.message[..]).collect::<Vec<_>>(),
        [b"five blocks"]
    );
    expected.transfer(&image, &blocks, &[0, 1, 2, 3, 4], 0..2);
    // All chunks have arrived, although the relay may not have processed the end yet.
    end_of(completion).result.unwrap();
    Image::of(&remote, &PeersInProcess).assert_equals(&expected, "through pinned memory");

    // And from the peer to the file.
    let back = Transfer::new(&remote, &file).blocks(&[0, 1], &[5, 6]).notify(*b"read");
    let mut expected = Image::of(&file, &PeersInProcess);
    expected.transfer(&Image::of(&remote, &PeersInProcess), &[0, 1], &[5, 6], 0..2);
    end_of(manager.submit(back, ()).unwrap()).result.unwrap();
    Image::of(&file, &PeersInProcess).assert_equals(&expected, "back into the file");
    assert_eq!(pair.there.wait_for_notifications(patience).unwrap()[0].message, b"read");
}
