//! Every named format converts into every other one of equal shape, with every engine of the host.

use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_layout::formats::{paged, vllm};
use terrane_layout::{ElementFormat, Geometry, LayoutConfig, RegionOffset, TokenOrder};
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
use terrane_transfer::{
    CopyEngine, CopyGrid, Declined, Endpoint, GridEnd, Planner, Side, Transfer, TransferError,
    TransferManager, TransferOptions, TransferPlan,
};

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
fn every_format_converts_into_every_other_through_files() {
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

type Copy = (RegionOffset, RegionOffset, u64);

/// The cells of a grid, by its documented formula.
fn cells(plan: &TransferPlan, grid: &CopyGrid) -> Vec<Copy> {
    let mut cells = Vec::new();
    let pairs = plan.grid_blocks(Side::Source).iter().zip(plan.grid_blocks(Side::Destination));
    for (&from, &to) in pairs {
        for layer in 0..grid.layers {
            for outer in 0..grid.outers {
                for row in 0..grid.rows {
                    for column in 0..grid.columns {
                        let at = |end: &GridEnd, block: u32| RegionOffset {
                            region: end.first_region + layer * end.regions_per_layer,
                            offset: end.offset
                                + u64::from(block) * end.block_stride
                                + u64::from(layer) * end.layer_stride
                                + u64::from(outer) * end.outer_stride
                                + u64::from(row) * end.row_stride
                                + u64::from(column) * end.column_stride,
                        };
                        let bytes = grid.bytes.get();
                        cells.push((at(&grid.destination, to), at(&grid.source, from), bytes));
                    }
                }
            }
        }
    }
    cells
}

/// The same copies in the order of the destination. Copies that are adjacent at both ends are
/// joined.
fn joined(mut copies: Vec<Copy>) -> Vec<Copy> {
    copies.sort_unstable();
    let mut joined: Vec<Copy> = Vec::new();
    for (to, from, bytes) in copies {
        let follows = |at: RegionOffset, length: u64, next: RegionOffset| {
            at.region == next.region && at.offset + length == next.offset
        };
        match joined.last_mut() {
            Some(last) if follows(last.0, last.2, to) && follows(last.1, last.2, from) => {
                last.2 += bytes;
            }
            _ => joined.push((to, from, bytes)),
        }
    }
    joined
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
                let cells = grids.iter().flat_map(|grid| cells(&plan, grid));
                let runs = plan.runs().iter().map(|run| {
                    let [from, to] = [run.source(), run.destination()];
                    (to, from, run.bytes().get())
                });
                let what = format!("{from_name} to {to_name}, {copied:?}");
                assert_eq!(joined(cells.collect()), joined(runs.collect()), "{what}");
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
                // Rows without stated heads convert if their bytes are equal.
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

/// Heads and elements continue each other at both ends, so they are one loop. An engine then reads the
/// one end and writes the other in long rows.
#[test]
fn loops_that_continue_each_other_are_one() {
    let config = LayoutConfig::builder().num_blocks(4).num_layers(3).outer_dim(2).page_size(16);
    let config = config.inner_dim(1024).num_heads(8).token_order(TokenOrder::TokenMajor);
    let config = config.element(ElementFormat::Width(2)).build().unwrap();
    let token_major = vllm::nhd(&config).unwrap();
    let paged = paged::vllm_v0(&config, 8).unwrap();
    let counts = |from, to| {
        let [source, destination] = [from, to].map(|end| endpoint(end, &HeapAllocator::system()));
        let transfer = Transfer::new(&source, &destination).blocks(&[0, 1], &[2, 3]);
        let plan = Planner::new().plan(&transfer).unwrap();
        let grids = plan.grids().unwrap();
        grids.iter().map(|grid| [grid.outers, grid.rows, grid.columns]).collect::<Vec<_>>()
    };
    // K in pieces of eight elements, and V in single elements.
    assert_eq!(counts(&token_major, &paged), [[1, 128, 16], [1, 1024, 16]]);
    assert_eq!(counts(&paged, &token_major), [[1, 16, 128], [1, 16, 1024]]);
}

/// The disk engine lists the runs of broken-up pieces. It declines a transfer whose list would take
/// gigabytes, before it lists any.
#[test]
fn pieces_that_are_broken_up_into_too_many_runs_are_declined_by_the_disk_engine() {
    let config = LayoutConfig::builder().num_blocks(12).num_layers(80).outer_dim(2).page_size(16);
    let config = config.inner_dim(1024).num_heads(8).token_order(TokenOrder::TokenMajor);
    let config = config.element(ElementFormat::Width(2)).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let paged = endpoint(&paged::vllm_v0(&config, 8).unwrap(), &HeapAllocator::system());
    let file = endpoint(&vllm::nhd(&config).unwrap(), &files);
    let engine = DiskEngine::new(&DiskEngineOptions::default()).unwrap();
    let quote = |blocks: &[u32]| {
        let plan =
            Planner::new().plan(&Transfer::new(&paged, &file).blocks(blocks, blocks)).unwrap();
        engine.quote(&plan, &TransferOptions::default()).map(drop)
    };
    let all: Vec<u32> = (0..12).collect();
    // A layer of a block has 2,048 runs of K and 16,384 of V.
    let (runs, limit) = (12 * 80 * 18_432, 1 << 24);
    assert_eq!(quote(&all), Err(Declined::TooManyRuns { runs, limit }));
    assert_eq!(quote(&all[..11]), Ok(()));
}
