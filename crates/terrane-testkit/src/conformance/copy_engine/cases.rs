//! The transfers of the suite: known shapes, and random ones.

use std::ops::Range;

use terrane_core::Alignment;
use terrane_layout::{ElementFormat, LayoutConfig, LayoutKind};
use terrane_transfer::Endpoint;

use super::EngineFixture;
use crate::model::Image;
use crate::random::Seeded;

pub(super) fn for_all_pairs(fixture: &impl EngineFixture, mut rule: impl FnMut(&str, &str)) {
    let mut pairs = 0;
    for &source in fixture.ends() {
        for &destination in fixture.ends() {
            if fixture.serves(source, destination) {
                rule(source, destination);
                pairs += 1;
            }
        }
    }
    assert!(pairs > 0, "the fixture supports no pair, so nothing was checked");
}

/// Pieces of 105 bytes, 3 layers, K and V.
pub(super) fn odd_config(blocks: u32, alignment: u64) -> LayoutConfig {
    let config = LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(3)
        .outer_dim(2)
        .page_size(5)
        .inner_dim(7)
        .element(ElementFormat::Width(3))
        .block_alignment(Alignment::new(alignment).expect("a power of two"));
    config.build().expect("a valid config")
}

pub(super) fn two_ends(
    fixture: &impl EngineFixture,
    source: &str,
    destination: &str,
) -> [Endpoint; 2] {
    let end = |name, kind| fixture.endpoint(name, odd_config(4, 1), kind);
    let ends = [end(source, LayoutKind::FullyContiguous), end(destination, LayoutKind::ALL[2])];
    for (end, seed) in ends.iter().zip(10..) {
        Image::scribble(end, fixture.access(), seed);
    }
    ends
}

pub(super) fn random_config(random: &mut Seeded) -> LayoutConfig {
    let mut number = |most| u32::try_from(1 + random.below(most)).expect("small");
    let config = LayoutConfig::builder()
        .num_blocks(1)
        .num_layers(number(4))
        .outer_dim(number(2))
        .page_size(number(9));
    let inner = 32 * number(3);
    let element = match number(4) {
        1 => ElementFormat::MXFP4,
        2 => ElementFormat::RowBytes(number(300)),
        _ => ElementFormat::Width(u8::try_from(number(8)).expect("at most 8")),
    };
    config.inner_dim(inner).element(element).build().expect("a valid config")
}

/// From 1 to `most`.
pub(super) fn random_number(random: &mut Seeded, most: u32) -> u32 {
    let below = random.below(usize::try_from(most).expect("small"));
    1 + u32::try_from(below).expect("small")
}

/// Destination blocks in random order without duplicates, and the same number of source blocks,
/// possibly repeated. In half of the cases both ascend.
pub(super) fn random_blocks(
    random: &mut Seeded,
    from: &Endpoint,
    to: &Endpoint,
) -> (Vec<u32>, Vec<u32>) {
    let [sources, destinations] = [from, to].map(|end| end.layout().geometry().num_blocks());
    let mut written: Vec<_> = (0..destinations).collect();
    random.shuffle(&mut written);
    written.truncate(random.below(written.len() + 1));
    let any = |_: &u32| u32::try_from(random.below(usize::try_from(sources).expect("small")));
    let mut read: Vec<_> = written.iter().map(any).map(|id| id.expect("small")).collect();
    if random.once_in(2) {
        read.sort_unstable();
        written.sort_unstable();
    }
    (read, written)
}

pub(super) fn random_range(random: &mut Seeded, end: u32) -> Range<u32> {
    let mut below = |bound: u32| {
        u32::try_from(random.below(usize::try_from(bound).expect("small"))).expect("small")
    };
    let start = below(end);
    start..start + 1 + below(end - start)
}
