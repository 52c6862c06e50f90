//! Layouts whose sections differ: some have layers, others have none.

use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_layout::{Axis, AxisSteps, Geometry, Section, SectionName, Step};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::conformance::formats::endpoint;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::regions::{Copied, RegionBytes};
use terrane_transfer::engines::{HostEngine, HostEngineOptions, RelayEngine, RelayOptions};
use terrane_transfer::{CopyEngine, Planner, Transfer, TransferError, TransferManager};

const BLOCKS: u32 = 5;
const LAYERS: u32 = 3;
/// Tokens of a block, and bytes of a row of K.
const ROWS: (u32, u32) = (4, 6);
/// Bytes of a block's state, which belongs to no layer.
const STATE: u32 = 10;

/// Pages of a state, then K layer by layer.
fn pages() -> Geometry {
    let (tokens, row) = ROWS;
    let piece = u64::from(tokens * row);
    let page = u64::from(STATE) + piece * u64::from(LAYERS) + 2;
    let block = AxisSteps::new(BLOCKS, page);
    let state = Section::new(SectionName::STATE, 1)
        .axis(Axis::Block, block)
        .axis(Axis::Element, AxisSteps::new(STATE, 1));
    let keys = Section::new(SectionName::K, 2)
        .at(0, STATE.into())
        .axis(Axis::Block, block)
        .axis(Axis::Layer, AxisSteps::new(LAYERS, piece))
        .axis(Axis::Token, AxisSteps::new(tokens, row.into()))
        .axis(Axis::Element, AxisSteps::new(row / 2, 2));
    Geometry::from_sections([state, keys]).unwrap()
}

/// A region for K of each layer, tokens outermost, and one for all states.
fn regions() -> Geometry {
    let (tokens, row) = ROWS;
    let keys = Section::new(SectionName::K, 2)
        .axis(Axis::Layer, AxisSteps::spread(LAYERS, 1, Step::ONE))
        .axis(Axis::Token, AxisSteps::new(tokens, u64::from(row * BLOCKS)))
        .axis(Axis::Block, AxisSteps::new(BLOCKS, row.into()))
        .axis(Axis::Element, AxisSteps::new(row / 2, 2));
    let state = Section::new(SectionName::STATE, 1)
        .at(LAYERS, 4)
        .axis(Axis::Block, AxisSteps::new(BLOCKS, u64::from(STATE) + 1))
        .axis(Axis::Element, AxisSteps::new(STATE, 1));
    Geometry::from_sections([keys, state]).unwrap()
}

fn host() -> Arc<dyn CopyEngine> {
    Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap())
}

#[test]
fn sections_without_layers_are_copied_once() {
    let relay = RelayEngine::new(host(), host(), HeapAllocator::pinned(), &RelayOptions::default());
    let managers =
        [TransferManager::new([host()]), TransferManager::new([Arc::new(relay.unwrap()) as _])];
    let all = [pages(), regions()];
    for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (from, to))) {
        for manager in &managers {
            let allocator = HeapAllocator::system();
            let (source, destination) = (endpoint(from, &allocator), endpoint(to, &allocator));
            let bytes = RegionBytes::scribble(&source, &InProcess, 1);
            let mut expected = RegionBytes::scribble(&destination, &InProcess, 2);
            let copied = Copied {
                from: vec![4, 0, 2],
                to: vec![1, 3, 0],
                layers: 0..LAYERS,
                heads: None,
                tokens: None,
            };
            let transfer = Transfer::new(&source, &destination).blocks(&copied.from, &copied.to);
            let plan = Planner::new().plan(&transfer).unwrap();
            let (tokens, row) = ROWS;
            let block = u64::from(tokens * row * LAYERS + STATE);
            assert_eq!(plan.bytes(), ByteCount::new(3 * block));
            assert_eq!(plan.pieces(), 3 * u64::from(LAYERS + 1));
            let runs: u64 = plan.runs().iter().map(|run| run.bytes().get()).sum();
            assert_eq!(runs, plan.bytes().get());
            end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
            expected.convert(to, &bytes, from, &copied);
            let what = format!("{} to {}", from.label(), to.label());
            RegionBytes::of(&destination, &InProcess).assert_equals(&expected, &what);
        }
    }
}

#[test]
fn some_layers_of_a_section_without_layers_are_refused() {
    let [source, destination] =
        [pages(), regions()].map(|geometry| endpoint(&geometry, &HeapAllocator::system()));
    let transfer = Transfer::new(&source, &destination).blocks(&[0], &[0]);
    for transfer in [transfer.clone().layers(0..1), transfer.layer_by_layer()] {
        let error = Planner::new().plan(&transfer).unwrap_err();
        let expected = SectionName::STATE;
        assert!(
            matches!(error, TransferError::SectionHasNoLayers { section, .. } if section == expected),
            "{error}"
        );
    }
}
