//! Every named format converts into every other of equal shape, by every engine of the host.

use std::sync::Arc;

use terrane_core::{Allocate, ByteCount};
use terrane_layout::{Geometry, LayoutBuilder};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::formats::{self, Sizes};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::random::Seeded;
use terrane_testkit::regions::{Copied, RegionBytes};
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{CopyEngine, Endpoint, Planner, Transfer, TransferError, TransferManager};

/// Sizes that are no powers of two where formats allow it.
const SIZES: Sizes = Sizes { blocks: 6, layers: 3, heads: 4, tokens: 6, elements: 8, width: 2 };

fn geometries() -> Vec<(&'static str, Geometry)> {
    let all = formats::all(SIZES).into_iter();
    all.map(|(name, geometry)| (name, geometry.unwrap_or_else(|e| panic!("{name}: {e}")))).collect()
}

fn endpoint(geometry: &Geometry, allocator: &impl Allocate) -> Endpoint {
    let layout = LayoutBuilder::from_geometry(geometry.clone()).allocate(allocator);
    Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
}

/// The shapes of the sections, in the order of their names.
fn shapes(geometry: &Geometry) -> Vec<impl PartialEq> {
    let mut shapes: Vec<_> =
        geometry.sections().iter().map(|section| (section.name(), section.shape())).collect();
    shapes.sort_by_key(|(name, _)| *name);
    shapes
}

/// All blocks in random pairs, then some of everything that both ends can select.
fn selections(geometry: &Geometry, random: &mut Seeded) -> Vec<Copied> {
    let blocks = geometry.num_blocks();
    let shuffled = |random: &mut Seeded| {
        let mut ids: Vec<u32> = (0..blocks).collect();
        for last in (1..ids.len()).rev() {
            ids.swap(last, usize::try_from(random.next_u64()).unwrap() % (last + 1));
        }
        ids
    };
    let all = Copied {
        from: (0..blocks).collect(),
        to: (0..blocks).collect(),
        layers: 0..geometry.num_layers(),
        heads: None,
        tokens: None,
    };
    let mut found = vec![Copied { from: shuffled(random), to: shuffled(random), ..all.clone() }];
    found.push(all.clone());
    let shapes: Vec<_> = geometry.sections().iter().map(|section| section.shape()).collect();
    if shapes.iter().any(|shape| shape.layers == 1) {
        return found;
    }
    found.push(Copied { from: vec![3, 3], to: vec![1, 4], layers: 1..3, ..all.clone() });
    if shapes.iter().all(|shape| shape.tokens == SIZES.tokens) {
        let tokens = Some([1..4, 2..5]);
        found.push(Copied { from: vec![2, 0], to: vec![5, 0], tokens, ..all.clone() });
    }
    if shapes.iter().all(|shape| shape.heads == Some(SIZES.heads)) {
        let heads = Some([1..3, 0..2]);
        let tokens = Some([0..6, 0..6]);
        found.push(Copied { from: vec![1], to: vec![2], heads, layers: 2..3, tokens });
    }
    found
}

fn transfer(source: &Endpoint, destination: &Endpoint, copied: &Copied) -> Transfer {
    let mut transfer = Transfer::new(source, destination).blocks(&copied.from, &copied.to);
    if copied.layers.len() < usize::try_from(SIZES.layers).unwrap() {
        transfer = transfer.layers(copied.layers.clone());
    }
    if let Some([from, to]) = copied.heads.clone() {
        transfer = transfer.heads(from, to);
    }
    match copied.tokens.clone() {
        Some([from, to]) => transfer.tokens(from, to),
        None => transfer,
    }
}

/// Where blocks of a format are tried, and which formats are.
struct Tried<F> {
    endpoint: F,
    is_tried: fn(&str) -> bool,
}

/// Converts every pair of equal shape and compares all bytes of the destination. Returns the number
/// of transfers.
fn convert_all(
    manager: &TransferManager,
    sources: &Tried<impl Fn(&Geometry) -> Endpoint>,
    destinations: &Tried<impl Fn(&Geometry) -> Endpoint>,
) -> usize {
    let geometries = geometries();
    let mut random = Seeded::new(7);
    let mut transfers = 0;
    for (from_name, from) in geometries.iter().filter(|(name, _)| (sources.is_tried)(name)) {
        let source = (sources.endpoint)(from);
        let bytes = RegionBytes::scribble(&source, &InProcess, random.next_u64());
        for (to_name, to) in &geometries {
            if shapes(from) != shapes(to) || !(destinations.is_tried)(to_name) {
                continue;
            }
            let destination = (destinations.endpoint)(to);
            let mut expected = RegionBytes::scribble(&destination, &InProcess, random.next_u64());
            for copied in selections(from, &mut random) {
                let what = format!("{from_name} to {to_name}, {copied:?}");
                let transfer = transfer(&source, &destination, &copied);
                let completion = match manager.submit(transfer, ()) {
                    Ok(completion) => completion,
                    Err(rejected) => panic!("{what}: {rejected}"),
                };
                if let Err(error) = end_of(completion).result {
                    panic!("{what}: {error}");
                }
                expected.convert(to, &bytes, from, &copied);
                RegionBytes::of(&destination, &InProcess).assert_equals(&expected, &what);
                transfers += 1;
            }
        }
        RegionBytes::of(&source, &InProcess).assert_equals(&bytes, from_name);
    }
    transfers
}

/// The formats that files are likely to have, and some that make the most of their pieces.
fn is_of_files(name: &str) -> bool {
    const NAMES: [&str; 8] = [
        "vllm.blnhc",
        "vllm.lbhnc",
        "vllm.page_padded_bl",
        "sglang.page_first_direct",
        "lmcache.kv_2ltd",
        "dynamo.fully_contiguous",
        "paged.aiter_shuffled",
        "model.scales_beside",
    ];
    NAMES.contains(&name) || name.contains("mla") || name.contains("unequal")
}

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
    let transfers = convert_all(&TransferManager::new([host()]), &in_memory, &in_memory);
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
    assert!(convert_all(&manager, &in_memory(|_| true), &in_file) > 600);
    assert!(convert_all(&manager, &in_file, &in_memory(is_of_files)) > 150);
}

#[test]
fn every_format_converts_into_every_other_by_relay() {
    let in_memory = in_memory(|_| true);
    let options = RelayOptions { slot_bytes: ByteCount::kib(4), ..RelayOptions::default() };
    let relay = RelayEngine::new(host(), host(), HeapAllocator::pinned(), &options).unwrap();
    let manager = TransferManager::new([Arc::new(relay) as _]);
    assert!(convert_all(&manager, &in_memory, &in_memory) > 3000);
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
