//! Random transfers against a model of bytes.

use std::any::Any;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use proptest::prelude::*;
use terrane_core::{Alignment, StorageKind};
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind, TokenOrder};
use terrane_testkit::conformance::copy_engine::{check_heads, check_transfer};
use terrane_testkit::conformance::{EngineFixture, check_copy_engine};
use terrane_testkit::engine::{SimulatedEngine, SimulatedEngineOptions};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint, Transfer, TransferManager};

use crate::support::*;

/// One end of a random transfer.
#[derive(Clone, Debug)]
pub struct End {
    pub kind: LayoutKind,
    pub storage: StorageKind,
    pub num_blocks: u32,
    pub alignment: Alignment,
    pub order: TokenOrder,
    /// For a shape that states heads.
    pub num_heads: u32,
}

/// A random transfer.
#[derive(Clone, Debug)]
pub struct Case {
    pub shape: LayoutConfig,
    pub ends: [End; 2],
    pub from: Vec<u32>,
    pub to: Vec<u32>,
    pub layers: Range<u32>,
    /// For a shape that states heads; all of them if none are named.
    pub heads: Option<[Range<u32>; 2]>,
    pub seed: u64,
}

impl Case {
    pub fn endpoints(&self) -> [Endpoint; 2] {
        self.ends.clone().map(|end| {
            let mut config = self.shape.with_num_blocks(end.num_blocks).unwrap();
            if config.num_heads().is_some() {
                config = config.with_num_heads(end.num_heads).unwrap();
                config = config.with_token_order(end.order).unwrap();
            }
            let config = config.with_block_alignment(end.alignment).unwrap();
            endpoint_in(&HeapAllocator::new(end.storage), config, end.kind)
        })
    }

    /// The transfer.
    pub fn transfer(&self, source: &Endpoint, destination: &Endpoint) -> Transfer {
        let transfer = Transfer::new(source, destination).blocks(&self.from, &self.to);
        let transfer = transfer.layers(self.layers.clone());
        match self.heads.clone() {
            Some([read, written]) => transfer.heads(read, written),
            None => transfer,
        }
    }
}

fn end() -> impl Strategy<Value = End> {
    let kind = proptest::sample::select(&LayoutKind::ALL);
    let storage = proptest::sample::select(&[StorageKind::System, StorageKind::Pinned, DEVICE]);
    // Mostly without padding, so that blocks join.
    let exponent = prop_oneof![3 => Just(0), 1 => 0..10_u32];
    let order = proptest::sample::select(&TokenOrder::ALL);
    let parts = (kind, storage, 1..12_u32, exponent, order, 1..7_u32);
    parts.prop_map(|(kind, storage, num_blocks, exponent, order, num_heads)| End {
        kind,
        storage,
        num_blocks,
        alignment: Alignment::new(1 << exponent).unwrap(),
        order,
        num_heads,
    })
}

fn shapes() -> impl Strategy<Value = LayoutConfig> {
    let element = prop_oneof![
        (1..=8_u8).prop_map(ElementFormat::Width),
        Just(ElementFormat::MXFP4),
        (1..100_u32).prop_map(ElementFormat::RowBytes),
    ];
    // Half of them state one head; the ends vary the number.
    let heads = proptest::bool::ANY;
    (1..5_u32, 1..=2_u32, 1..6_u32, 1..3_u32, element, heads).prop_map(
        |(layers, outers, page, inner, element, heads)| {
            let config = LayoutConfig::builder()
                .num_blocks(1)
                .num_layers(layers)
                .outer_dim(outers)
                .page_size(page)
                .inner_dim(inner * 32)
                .element(element);
            if heads { config.num_heads(1) } else { config }.build().unwrap()
        },
    )
}

/// The same number of heads of either end: some, or all if the ends have the same number.
fn heads([read, written]: [u32; 2]) -> impl Strategy<Value = Option<[Range<u32>; 2]>> {
    let some = (1..=read.min(written)).prop_flat_map(move |count| {
        let range = move |all: u32| (0..=all - count).prop_map(move |from| from..from + count);
        [range(read), range(written)].prop_map(Some)
    });
    let all = if read == written { 1 } else { 0 };
    prop_oneof![2 => some, all => Just(None)]
}

/// Pairs of blocks: scattered with repeated sources, or a range of adjacent ones, or all of them.
fn pairs(sources: u32, destinations: u32) -> impl Strategy<Value = (Vec<u32>, Vec<u32>)> {
    let most = usize::try_from(destinations).unwrap();
    let all: Vec<u32> = (0..destinations).collect();
    let scattered = proptest::sample::subsequence(all, 0..=most).prop_shuffle();
    let scattered = scattered
        .prop_flat_map(move |to| (proptest::collection::vec(0..sources, to.len()), Just(to)));
    let neighbours = (0..sources, 0..destinations, 1..=sources.min(destinations));
    let neighbours = neighbours.prop_map(move |(from, to, count)| {
        let count = count.min(sources - from).min(destinations - to);
        ((from..from + count).collect(), (to..to + count).collect())
    });
    prop_oneof![scattered, neighbours]
}

pub fn cases() -> impl Strategy<Value = Case> {
    let layers = |all: u32| (0..all).prop_flat_map(move |start| (Just(start), start + 1..=all));
    (shapes(), [end(), end()], any::<u64>()).prop_flat_map(move |(shape, ends, seed)| {
        let pairs = pairs(ends[0].num_blocks, ends[1].num_blocks);
        let all = shape.num_layers();
        let layers = prop_oneof![Just((0, all)), layers(all)];
        let heads = match shape.num_heads() {
            Some(_) => heads([ends[0].num_heads, ends[1].num_heads]).boxed(),
            None => Just(None).boxed(),
        };
        (Just(shape), Just(ends), pairs, layers, heads, Just(seed)).prop_map(
            |(shape, ends, (from, to), (start, end), heads, seed)| Case {
                shape,
                ends,
                from,
                to,
                layers: start..end,
                heads,
                seed,
            },
        )
    })
}

fn manager(seed: u64) -> TransferManager {
    let options = SimulatedEngineOptions::default().reordering(seed);
    let options = options.threads(NonZeroUsize::new(2).unwrap());
    TransferManager::new([Arc::new(SimulatedEngine::new(options)) as Arc<dyn CopyEngine>])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn transfers_move_the_bytes_that_the_model_moves(case in cases()) {
        let [source, destination] = case.endpoints();
        Image::scribble(&source, &InProcess, case.seed);
        Image::scribble(&destination, &InProcess, !case.seed);
        let (from, to) = ((&source, &case.from[..]), (&destination, &case.to[..]));
        check_heads(&manager(case.seed), &InProcess, from, to, case.layers, case.heads).unwrap();
    }

    #[test]
    fn transfers_within_a_layout_move_the_bytes_that_the_model_moves(
        case in cases(),
        half in 1..6_u32,
    ) {
        let end = Case { ends: [(); 2].map(|()| End { num_blocks: 2 * half, ..case.ends[0].clone() }), ..case.clone() };
        let [both, _] = end.endpoints();
        Image::scribble(&both, &InProcess, case.seed);
        // Even blocks to odd ones, in reverse.
        let from: Vec<_> = (0..half).map(|block| 2 * block).collect();
        let to: Vec<_> = from.iter().rev().map(|block| block + 1).collect();
        let manager = manager(case.seed);
        check_transfer(&manager, &InProcess, (&both, &from), (&both, &to), case.layers);
    }

    #[test]
    fn a_copy_there_and_back_changes_nothing(case in cases()) {
        let [source, destination] = case.endpoints();
        let before = Image::scribble(&source, &InProcess, case.seed);
        let manager = manager(case.seed);
        // Every block that was copied is copied back from there, from one block only.
        let mut seen = std::collections::BTreeSet::new();
        let pairs = case.from.iter().zip(&case.to).filter(|(from, _)| seen.insert(**from));
        let (from, to): (Vec<u32>, Vec<u32>) = pairs.unzip();
        let (there, back) = ((&source, &from[..]), (&destination, &to[..]));
        let heads = case.heads;
        let reversed = heads.clone().map(|[read, written]| [written, read]);
        check_heads(&manager, &InProcess, there, back, case.layers.clone(), heads).unwrap();
        check_heads(&manager, &InProcess, back, there, case.layers, reversed).unwrap();
        Image::of(&source, &InProcess).assert_equals(&before, "there and back again");
    }
}

/// The engine that the other tests use passes the conformance suite.
struct Simulated;

impl EngineFixture for Simulated {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        Arc::new(SimulatedEngine::default())
    }

    fn ends(&self) -> &[&'static str] {
        &["pinned", "device"]
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let storage = if end == "pinned" { StorageKind::Pinned } else { DEVICE };
        endpoint_in(&HeapAllocator::new(storage), config, kind)
    }

    /// By default, the engine copies between all kinds.
    fn unserved(&self, _: LayoutConfig) -> Option<Endpoint> {
        None
    }

    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        Some(unreached())
    }

    fn least_relayouts(&self) -> usize {
        40
    }
}

#[test]
fn the_simulated_engine_conforms() {
    check_copy_engine(&Simulated);
}
