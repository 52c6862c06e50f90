//! Memory of a device and files, through GDS.

use std::sync::Arc;

use terrane_core::{Allocate, AllocateError, RegionRequest, delegate_allocate};
use terrane_cuda::{Context, DeviceAllocator};
use terrane_nixl::{NixlEngine, NixlEngineOptions};
use terrane_storage::{DiskAllocator, DiskFile, DiskOptions};
use terrane_testkit::pattern::Pattern;
use terrane_transfer::{CopyEngine, DeviceOrder, Transfer, TransferManager};

use super::{CONTIGUOUS, SEPARATE, SOME, agent, end, try_end};
use crate::machine::{device, refused_by_cufile, with_gds};
use crate::needs::OnDevice;

const BLOCKS: u32 = 32;

#[test]
fn blocks_of_a_device_go_to_a_file_and_back_through_gds() {
    const TEST: &str = "transfers::files::blocks_of_a_device_go_to_a_file_and_back_through_gds";
    let Some(context) = device(TEST, SOME) else { return };
    check_file_round_trip(TEST, &context, "GDS");
}

#[test]
fn blocks_of_a_device_go_to_a_file_and_back_through_gds_with_threads() {
    const TEST: &str =
        "transfers::files::blocks_of_a_device_go_to_a_file_and_back_through_gds_with_threads";
    let Some(context) = device(TEST, SOME) else { return };
    check_file_round_trip(TEST, &context, "GDS_MT");
}

/// Copies scattered blocks to a file, overwrites the device's blocks, and copies the file's blocks
/// to other blocks of the device.
fn check_file_round_trip(test: &str, context: &Context, backend: &str) {
    // The plugin is in the bundle.
    let Some(agent) = with_gds(test, agent("gds", backend)) else { return };
    let directory = tempfile::tempdir().unwrap();
    let files = Named(DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap());
    let device = end(&DeviceAllocator::new(context), &agent, BLOCKS, SEPARATE);
    let file = match try_end(&files, &agent, BLOCKS, CONTIGUOUS) {
        Ok(file) => file,
        Err(error) => return refused_by_cufile(test, directory.path(), &error),
    };
    let access = OnDevice::new(context);
    let (data, poison) = (Pattern::new(3), Pattern::new(4));
    let all: Vec<u32> = (0..BLOCKS).collect();
    data.fill_with(&device, &all, &access).unwrap();
    let engine = NixlEngine::new(&agent, NixlEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(engine) as Arc<dyn CopyEngine>]);
    let make = |transfer: Transfer| {
        let transfer = transfer.device_order(DeviceOrder::AlreadySynchronised);
        let report = manager.submit(transfer, ()).unwrap().wait().result.unwrap();
        eprintln!("{report}");
    };
    let (from, to): (Vec<u32>, Vec<u32>) = all.iter().map(|n| (n * 5 % 32, n * 3 % 32)).unzip();
    make(Transfer::new(&device, &file).blocks(&from, &to));
    poison.fill_with(&device, &all, &access).unwrap();
    // Half of the blocks, so that the other half shows writes beyond them.
    let (from, back) = (&from[..16], &to[..16]);
    let into: Vec<u32> = (16..32).collect();
    make(Transfer::new(&file, &device).blocks(back, &into));
    for (pattern, blocks, filled_as) in [(data, &into[..], from), (poison, &all[..16], &all[..16])]
    {
        let seen = pattern.verify_with(&device, blocks, filled_as, 0..4, &access).unwrap();
        assert_eq!((seen.mismatches, seen.first), (0, None), "of {} bytes", seen.bytes);
    }
}

/// Files with names, because cuFile reads the path of each file.
struct Named(DiskAllocator);

// SAFETY: each region is a new file, in a directory that only the test uses.
unsafe impl Allocate for Named {
    type Memory = DiskFile;

    delegate_allocate!(self, self.0);

    fn allocate(&self, request: &RegionRequest) -> Result<DiskFile, AllocateError> {
        let path = self.0.directory().join("blocks");
        Ok(DiskFile::create_new(&path, request.bytes, &DiskOptions::default()).unwrap())
    }
}
