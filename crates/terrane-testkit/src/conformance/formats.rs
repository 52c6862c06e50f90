//! Every named format converts into every other of equal shape.

use std::num::NonZeroUsize;

use terrane_core::Allocate;
use terrane_layout::{Geometry, LayoutBuilder, SectionName, SectionShape};
use terrane_transfer::{Endpoint, Transfer, TransferManager};

use super::copy_engine::{end_of, ordered};
use crate::formats::{self, Sizes};
use crate::pattern::PieceAccess;
use crate::random::Seeded;
use crate::regions::{Copied, RegionBytes};

/// Sizes that are not powers of two where formats permit it.
pub const SIZES: Sizes = Sizes { blocks: 6, layers: 3, heads: 4, tokens: 6, elements: 8, width: 2 };

/// Every format in these sizes, with its name.
///
/// # Panics
///
/// If a format cannot be created.
#[must_use]
pub fn geometries() -> Vec<(&'static str, Geometry)> {
    let all = formats::all(SIZES).into_iter();
    all.map(|(name, geometry)| (name, geometry.unwrap_or_else(|e| panic!("{name}: {e}")))).collect()
}

/// Blocks of a format in memory of an allocator.
///
/// # Panics
///
/// If there is no memory.
pub fn endpoint(geometry: &Geometry, allocator: &impl Allocate) -> Endpoint {
    let layout = LayoutBuilder::from_geometry(geometry.clone()).allocate(allocator);
    Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
}

/// The shapes of the sections, in the order of their names.
#[must_use]
pub fn shapes(geometry: &Geometry) -> Vec<(SectionName, SectionShape)> {
    let mut shapes: Vec<_> =
        geometry.sections().iter().map(|section| (section.name(), section.shape())).collect();
    shapes.sort_by_key(|(name, _)| *name);
    shapes
}

/// All blocks in random pairs, and then random selections of everything that both ends can select.
pub fn selections(geometry: &Geometry, random: &mut Seeded) -> Vec<Copied> {
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

/// The transfer of a selection.
pub fn transfer(source: &Endpoint, destination: &Endpoint, copied: &Copied) -> Transfer {
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

/// The formats to convert, and their memory.
#[derive(Debug)]
pub struct Tried<F> {
    /// Creates an end.
    pub endpoint: F,
    /// Whether a format is converted, by its name.
    pub is_tried: fn(&str) -> bool,
}

/// Converts every pair of equal shape and compares all bytes of the destination. Returns the number
/// of transfers.
///
/// If `TERRANE_FORMAT_PAIRS` is `n`, it converts one pair of `n`. The number that it returns is then
/// that of all pairs, about: that of its transfers times `n`.
///
/// # Panics
///
/// If a transfer is refused, fails, or copies a wrong byte, or if the variable is no number above 0.
pub fn convert_all(
    manager: &TransferManager,
    access: &dyn PieceAccess,
    sources: &Tried<impl Fn(&Geometry) -> Endpoint>,
    destinations: &Tried<impl Fn(&Geometry) -> Endpoint>,
) -> usize {
    let geometries = geometries();
    let mut random = Seeded::new(7);
    let (mut pairs, every, mut transfers) = (0_usize, one_pair_of(), 0);
    for (from_name, from) in geometries.iter().filter(|(name, _)| (sources.is_tried)(name)) {
        let source = (sources.endpoint)(from);
        let bytes = RegionBytes::scribble(&source, access, random.next_u64());
        for (to_name, to) in &geometries {
            if shapes(from) != shapes(to) || !(destinations.is_tried)(to_name) {
                continue;
            }
            pairs += 1;
            if !pairs.is_multiple_of(every) {
                continue;
            }
            let destination = (destinations.endpoint)(to);
            let mut expected = RegionBytes::scribble(&destination, access, random.next_u64());
            for copied in selections(from, &mut random) {
                let case = format!("{from_name} to {to_name}, {copied:?}");
                let transfer = transfer(&source, &destination, &copied);
                let transfer = ordered(transfer, &source, &destination);
                let completion = match manager.submit(transfer, ()) {
                    Ok(completion) => completion,
                    Err(rejected) => panic!("{case}: {rejected}"),
                };
                if let Err(error) = end_of(completion).result {
                    panic!("{case}: {error}");
                }
                expected.convert(to, &bytes, from, &copied);
                RegionBytes::of(&destination, access).assert_equals(&expected, &case);
                transfers += 1;
            }
        }
        RegionBytes::of(&source, access).assert_equals(&bytes, from_name);
    }
    transfers * every
}

#[expect(clippy::disallowed_methods, reason = "a slow build of the tests converts fewer pairs")]
fn one_pair_of() -> usize {
    let number = std::env::var("TERRANE_FORMAT_PAIRS");
    number.map_or(1, |number| number.parse::<NonZeroUsize>().unwrap().get())
}

/// Calls `check` with every pair of equal shape, whose source has random bytes, and with selections of
/// whole blocks or of some of their tokens. Its text names the case. Returns the number of calls.
///
/// # Panics
///
/// If an end cannot be created, or `check` panics.
pub fn each_pair(
    access: &dyn PieceAccess,
    mut random: Seeded,
    sources: &Tried<impl Fn(&Geometry) -> Endpoint>,
    destinations: &Tried<impl Fn(&Geometry) -> Endpoint>,
    mut check: impl FnMut([&Endpoint; 2], &Copied, &str),
) -> usize {
    let (geometries, mut calls) = (geometries(), 0);
    for (from_name, from) in geometries.iter().filter(|(name, _)| (sources.is_tried)(name)) {
        let source = (sources.endpoint)(from);
        RegionBytes::scribble(&source, access, random.next_u64());
        for (to_name, to) in &geometries {
            if shapes(from) != shapes(to) || !(destinations.is_tried)(to_name) {
                continue;
            }
            let destination = (destinations.endpoint)(to);
            for mut copied in selections(from, &mut random) {
                (copied.layers, copied.heads) = (0..from.num_layers(), None);
                let case = format!("{from_name} to {to_name}, {copied:?}");
                check([&source, &destination], &copied, &case);
                calls += 1;
            }
        }
    }
    calls
}

/// Formats that are likely in files, and some with the most pieces.
#[must_use]
pub fn is_of_files(name: &str) -> bool {
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
