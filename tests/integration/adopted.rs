//! Offloads and restores an engine's own tensors.

use std::ptr::NonNull;
use std::sync::Arc;

use terrane::core::{ByteCount, ForeignMemory, HostAddress, Location, Span, StorageKind};
use terrane::layout::{LayoutBuilder, LayoutKind};
use terrane::storage::{DiskAllocator, DiskOptions};
use terrane::transfer::{Endpoint, TransferManager};
use terrane_testkit::pattern::Pattern;

use crate::support::*;

/// An engine's tensor: memory of another allocator, shared by its users.
struct Tensor(Box<[u8]>);

#[test]
fn tensors_of_an_engine_are_offloaded_and_restored_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let config = config(8);
    let a_layer = config.total_bytes().get() / u64::from(config.num_layers());
    let tensors: Vec<Arc<Tensor>> = (0..config.num_layers())
        .map(|_| Arc::new(Tensor(vec![0; ByteCount::new(a_layer).to_usize()].into())))
        .collect();
    let memories = tensors.iter().map(|tensor| {
        let first = NonNull::from(&tensor.0[0]);
        let location = Location::Host(HostAddress::new(first));
        let length = ByteCount::new(a_layer);
        let span = Span { kind: StorageKind::System, location, length };
        // SAFETY: the tensor is the owner, and its bytes are initialised and do not move. This test
        // reads them only when no transfer is in flight.
        unsafe { ForeignMemory::new(span, Arc::clone(tensor)) }
    });
    let builder = LayoutBuilder::new(config).kind(LayoutKind::ALL[2]).adopt_memory(memories);
    let cache = Endpoint::new(builder.unregistered().build().unwrap()).unwrap();
    assert_eq!(Arc::strong_count(&tensors[0]), 2, "the layout keeps the tensor alive");

    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let disk = endpoint(8, LayoutKind::FullyContiguous, &files);
    let manager = TransferManager::with_default_engines().unwrap();
    let pattern = Pattern::new(9);
    pattern.fill(&cache).unwrap();
    let blocks: Vec<u32> = (0..8).collect();
    copy_blocks(&manager, (&cache, &blocks), (&disk, &blocks));
    Pattern::new(10).fill(&cache).unwrap();
    copy_blocks(&manager, (&disk, &blocks), (&cache, &blocks));
    pattern.verify(&cache).unwrap().assert_clean("the bytes that were restored to the tensors");

    drop(cache);
    assert_eq!(Arc::strong_count(&tensors[0]), 1);
}
