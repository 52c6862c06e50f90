//! Every named format converts into every other of equal shape, by every engine of the host.

use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_layout::Geometry;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::formats::{
    Tried, convert_all, endpoint, geometries, is_of_files, selections, shapes, transfer,
};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::random::Seeded;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{CopyEngine, Endpoint, Planner, Transfer, TransferError, TransferManager};

fn host() -> Arc<dyn CopyEngine> {
    // Small chunks, so that threads share each transfer.
    let options = HostEngineOptions { chunk: ByteCount::new(64), ..HostEngineOptions::default() };
    Arc::new(HostEngine::new(options).unwrap())
}

fn in_memory(is_tried: fn(&str) -> bool) -> Tried<impl Fn(&Geometry) -> Endpoint> {
    let endpoint = |geometry: &Geometry| endpoint(geometry, &HeapAllocator::system());
    Tried { endpoint, is_tried }
}

#[test]
fn every_format_converts_into_every_other_in_host_memory() {
    let in_memory = in_memory(|_| true);
    let transfers =
        convert_all(&TransferManager::new([host()]), &InProcess, &in_memory, &in_memory);
    assert!(transfers > 3000, "{transfers}");
}

#[test]
fn every_format_converts_into_every_other_by_way_of_files() {
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let engine = DiskEngine::new(&DiskEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(engine) as _]);
    let endpoint = |geometry: &Geometry| endpoint(geometry, &files);
    let in_file = Tried { endpoint, is_tried: is_of_files };
    assert!(convert_all(&manager, &InProcess, &in_memory(|_| true), &in_file) > 600);
    assert!(convert_all(&manager, &InProcess, &in_file, &in_memory(is_of_files)) > 150);
}

#[test]
fn every_format_converts_into_every_other_by_relay() {
    let in_memory = in_memory(|_| true);
    let options = RelayOptions { slot_bytes: ByteCount::kib(4), ..RelayOptions::default() };
    let relay = RelayEngine::new(host(), host(), HeapAllocator::pinned(), &options).unwrap();
    let manager = TransferManager::new([Arc::new(relay) as _]);
    assert!(convert_all(&manager, &InProcess, &in_memory, &in_memory) > 3000);
}

#[test]
fn grids_and_runs_are_the_same_copies_for_every_pair() {
    let geometries = geometries();
    let planner = Planner::new();
    let mut with_grids = 0;
    for (from_name, from) in &geometries {
        for (to_name, to) in &geometries {
            if shapes(from) != shapes(to) {
                continue;
            }
            let [source, destination] =
                [from, to].map(|geometry| endpoint(geometry, &HeapAllocator::system()));
            for copied in selections(from, &mut Seeded::new(1)) {
                let plan = planner.plan(&transfer(&source, &destination, &copied)).unwrap();
                for (index, run) in plan.runs().iter().enumerate() {
                    assert_eq!(plan.run(index), Some(*run));
                }
                assert_eq!(plan.run(plan.runs().len()), None);
                let Some(grids) = plan.grids() else { continue };
                with_grids += 1;
                let pairs = u64::try_from(copied.from.len()).unwrap();
                let bytes: u64 = grids.iter().map(|grid| grid.block_bytes() * pairs).sum();
                assert_eq!(bytes, plan.bytes().get(), "{from_name} to {to_name}");
            }
        }
    }
    assert!(with_grids > 1000, "{with_grids}");
}

#[test]
fn formats_of_other_shapes_are_refused() {
    let geometries = geometries();
    let planner = Planner::new();
    let mut refused = 0;
    for (from_name, from) in &geometries {
        for (to_name, to) in &geometries {
            if shapes(from) == shapes(to) {
                continue;
            }
            let [source, destination] =
                [from, to].map(|geometry| endpoint(geometry, &HeapAllocator::system()));
            let transfer = Transfer::new(&source, &destination).blocks(&[0], &[1]);
            match planner.plan(&transfer) {
                Err(
                    TransferError::ShapeMismatch { .. }
                    | TransferError::NoSuchSection { .. }
                    | TransferError::HeadsNotStated { .. },
                ) => refused += 1,
                // Rows of heads that are not stated convert if their bytes are equal.
                Ok(plan) => assert_eq!(
                    from.block_bytes(),
                    to.block_bytes(),
                    "{from_name} to {to_name}: {plan:?}"
                ),
                Err(error) => panic!("{from_name} to {to_name}: {error}"),
            }
        }
    }
    assert!(refused > 300, "{refused}");
}
