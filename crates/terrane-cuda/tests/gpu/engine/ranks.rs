//! Heads on a device: conversions of token and head order, and pages that contain the heads of all
//! ranks.

use std::time::Duration;

use terrane_core::ByteCount;
use terrane_cuda::{Calibration, CopyPath, DeviceEngineOptions, Direction, PathCost};
use terrane_layout::TokenOrder::{self, HeadMajor, TokenMajor};
use terrane_layout::{BlockDimension, ElementFormat, LayoutConfig, LayoutKind};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{check_heads, end_of, ordered};
use terrane_testkit::model::Image;
use terrane_transfer::{Endpoint, Transfer};

use super::fixture::{APART, DEVICE, Fixture, LAYERS_APART, PINNED};
use crate::needs::{Needs, device_with_kernels as device};

const ROOM: Needs = Needs { device: ByteCount::mib(256), host: ByteCount::mib(256) };
const ALL: [&str; 3] = [DEVICE, APART, PINNED];
const OUTER_FIRST: LayoutKind =
    LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };

/// 16 tokens of heads of 128 bytes, in 3 layers of K and V.
fn config_with_heads(heads: u32, order: TokenOrder) -> LayoutConfig {
    config_with_head_size(heads, 64, order)
}

/// The same, with heads of this many elements of two bytes.
fn config_with_head_size(heads: u32, elements: u32, order: TokenOrder) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(10)
        .num_layers(3)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(elements * heads)
        .element(ElementFormat::Width(2))
        .num_heads(heads)
        .token_order(order)
        .build()
        .unwrap()
}

fn end(fixture: &Fixture, name: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
    let end = fixture.endpoint(name, config, kind);
    Image::scribble(&end, fixture.access(), config.num_heads().unwrap().into());
    end
}

/// A kernel within the device copies cells of at least 32 bytes as fast as whole pieces, and transposes
/// shorter ones in tiles if a piece fills a tile. Waiting threads sleep until shortly before the
/// predicted end, so a prediction by cells delays them.
#[test]
fn predictions_within_the_device_count_pieces_unless_short_cells_fill_no_tile() {
    let name = "predictions_within_the_device_count_pieces_unless_short_cells_fill_no_tile";
    let Some(context) = device(name, ROOM) else { return };
    let cost = PathCost {
        fixed: Duration::from_micros(5),
        per_piece_ns: 1e3,
        per_short_piece_ns: 1e3,
        bytes_per_second: 2e12,
    };
    let mut calibration = Calibration::built_in();
    calibration.set(Direction::WithinDevice, CopyPath::Relayout, cost);
    let options = DeviceEngineOptions {
        path: Some(CopyPath::Relayout),
        calibration: Some(calibration),
        learns: false,
        ..DeviceEngineOptions::default()
    };
    let fixture = Fixture::new(&context, options, &ALL);
    let manager = fixture.manager();
    let predicted = |heads, elements, from, to| {
        let config = |order| config_with_head_size(heads, elements, order);
        let from = end(&fixture, APART, config(from), OUTER_FIRST);
        let to = end(&fixture, DEVICE, config(to), LayoutKind::FullyContiguous);
        let transfer = Transfer::new(&from, &to).blocks(&[7, 0, 4], &[1, 9, 2]);
        manager.explain(&ordered(transfer, &from, &to)).unwrap().predicted
    };
    let pieces = 3 * 3 * 2;
    for (heads, elements) in [(8, 64), (8, 16), (128, 8)] {
        let bytes = pieces * 16 * u64::from(heads * elements) * 2;
        let expected = Duration::from_secs_f64(cost.predict(bytes, pieces));
        assert_eq!(predicted(heads, elements, TokenMajor, TokenMajor), expected);
        assert_eq!(predicted(heads, elements, TokenMajor, HeadMajor), expected);
    }
    let cells = pieces * 16 * 8;
    let expected = Duration::from_secs_f64(cost.predict(cells * 16, cells));
    assert_eq!(predicted(8, 8, TokenMajor, HeadMajor), expected);
}

/// Token-major to head-major and back: from the device, to it and within it.
#[test]
fn the_order_of_tokens_and_heads_is_converted_exactly() {
    let name = "the_order_of_tokens_and_heads_is_converted_exactly";
    let Some(context) = device(name, ROOM) else { return };
    let ways = [(APART, PINNED), (PINNED, APART), (APART, DEVICE), (DEVICE, APART)];
    for (path, ways) in [
        (None, &ways[..]),
        (Some(CopyPath::Direct), &ways[..2]),
        (Some(CopyPath::Relayout), &ways[2..]),
    ] {
        let options = DeviceEngineOptions { path, ..DeviceEngineOptions::default() };
        let fixture = Fixture::new(&context, options, &ALL);
        let manager = fixture.manager();
        for &(source, destination) in ways {
            for [from, to] in [[TokenMajor, HeadMajor], [HeadMajor, TokenMajor]] {
                let from = end(&fixture, source, config_with_heads(8, from), OUTER_FIRST);
                let to = end(
                    &fixture,
                    destination,
                    config_with_heads(8, to),
                    LayoutKind::FullyContiguous,
                );
                let (read, written) = ((&from, &[7, 0, 4][..]), (&to, &[1, 9, 2][..]));
                let heads = Some([0..8, 0..8]);
                let served = check_heads(&manager, fixture.access(), read, written, 0..3, heads);
                let explanation = served.unwrap().explanation;
                assert!(explanation.path().contains("kernel"), "{explanation}");
            }
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// Four ranks with 2 of 8 heads each write their parts of the same pinned pages at once. Two ranks
/// with 4 heads each read the pages, and write equal pages.
#[test]
fn pages_in_pinned_memory_do_not_depend_on_the_number_of_ranks() {
    let name = "pages_in_pinned_memory_do_not_depend_on_the_number_of_ranks";
    let Some(context) = device(name, ROOM) else { return };
    let fixture = Fixture::new(&context, DeviceEngineOptions::default(), &ALL);
    let manager = fixture.manager();
    let blocks = [4, 0, 3, 9];
    let of_rank = [1, 2, 5, 8];
    for [paged, ranked] in [[HeadMajor, TokenMajor], [TokenMajor, HeadMajor]] {
        let [page, last] = [(); 2].map(|()| {
            end(&fixture, PINNED, config_with_heads(8, paged), LayoutKind::FullyContiguous)
        });
        let mut expected = Image::of(&page, fixture.access());
        let ranks: Vec<_> = (0..4_u32)
            .map(|rank| {
                let config = config_with_heads(2, ranked);
                let end = fixture.endpoint(APART, config, LAYERS_APART);
                let image = Image::scribble(&end, fixture.access(), 100 + u64::from(rank));
                let heads = [0..2, 2 * rank..2 * rank + 2];
                expected.transfer_heads(&image, &of_rank, &blocks, 0..3, heads);
                end
            })
            .collect();
        let all: Vec<_> = (0_u32..)
            .zip(&ranks)
            .map(|(rank, own)| {
                let transfer = ordered(Transfer::new(own, &page), own, &page);
                let transfer = transfer.blocks(&of_rank, &blocks);
                let transfer = transfer.heads(0..2, 2 * rank..2 * rank + 2);
                manager.submit(transfer, ()).unwrap()
            })
            .collect();
        all.into_iter().for_each(|rank| drop(end_of(rank).result.unwrap()));
        Image::of(&page, fixture.access()).assert_equals(&expected, "the heads of four ranks");

        for rank in 0..2 {
            let own = end(&fixture, DEVICE, config_with_heads(4, ranked), OUTER_FIRST);
            let heads = 4 * rank..4 * rank + 4;
            let (of_page, of_own) = ((&page, &blocks[..]), (&own, &of_rank[..]));
            let there = Some([heads.clone(), 0..4]);
            check_heads(&manager, fixture.access(), of_page, of_own, 0..3, there).unwrap();
            let (of_own, of_last) = ((&own, &of_rank[..]), (&last, &blocks[..]));
            let back = Some([0..4, heads]);
            check_heads(&manager, fixture.access(), of_own, of_last, 0..3, back).unwrap();
        }
        let mut same = Image::of(&last, fixture.access());
        same.transfer(&expected, &blocks, &blocks, 0..3);
        Image::of(&last, fixture.access()).assert_equals(&same, "the heads of two ranks");
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
