//! Conversions of token and head order, and pages that contain the heads of all ranks.

use std::sync::Arc;

use terrane_layout::TokenOrder::{self, HeadMajor, TokenMajor};
use terrane_layout::{ElementFormat, LayoutConfig, LayoutConfigBuilder, LayoutKind};
use terrane_testkit::conformance::copy_engine::{check_heads, end_of};
use terrane_testkit::engine::SimulatedEngine;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::InProcess;
use terrane_transfer::engines::{HostEngine, HostEngineOptions};
use terrane_transfer::{Endpoint, Planner, Side, Transfer, TransferError, TransferManager};

use crate::support::*;

/// 5 tokens of heads of 6 bytes, in 2 layers of K and V.
fn config_with_heads(heads: u32, order: TokenOrder) -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(6)
        .num_layers(2)
        .outer_dim(2)
        .page_size(5)
        .inner_dim(3 * heads)
        .element(ElementFormat::Width(2))
        .num_heads(heads)
        .token_order(order)
        .build()
        .unwrap()
}

fn end(heads: u32, order: TokenOrder, kind: LayoutKind) -> Endpoint {
    let end = endpoint(config_with_heads(heads, order), kind);
    Image::scribble(&end, &InProcess, heads.into());
    end
}

/// A page of 8 heads is copied to 4 ranks, and from the ranks to a second page. The second page is
/// copied to 2 ranks, and from them to a third page. Every copy equals the model, and the last page
/// equals the first.
#[test]
fn pages_do_not_depend_on_the_number_of_ranks() {
    let host = HostEngine::new(HostEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(host) as _]);
    for [paged, ranked] in [[HeadMajor, TokenMajor], [TokenMajor, HeadMajor]] {
        let blocks = [4, 0, 3];
        let first = end(8, paged, CONTIGUOUS);
        let of_first = Image::scribble(&first, &InProcess, 77);
        let mut page = first.clone();
        for (ranks, kind) in [(4, OUTER_FIRST), (2, BLOCK_FIRST)] {
            let next = end(8, if ranks == 2 { paged } else { ranked }, CONTIGUOUS);
            let each = 8 / ranks;
            for heads in (0..ranks).map(|rank| rank * each..(rank + 1) * each) {
                let rank = end(each, ranked, kind);
                let (there, back) = ([heads.clone(), 0..each], [0..each, heads]);
                let (of_page, of_rank, of_next) =
                    ((&page, &blocks[..]), (&rank, &[1, 2, 5][..]), (&next, &blocks[..]));
                check_heads(&manager, &InProcess, of_page, of_rank, 0..2, Some(there)).unwrap();
                check_heads(&manager, &InProcess, of_rank, of_next, 0..2, Some(back)).unwrap();
            }
            page = next;
        }
        let mut expected = Image::of(&page, &InProcess);
        expected.transfer(&of_first, &blocks, &blocks, 0..2);
        Image::of(&page, &InProcess).assert_equals(&expected, "the last page");
    }
}

#[test]
fn ranks_write_their_heads_of_one_page_at_once() {
    let engine = Arc::new(SimulatedEngine::default());
    let manager = TransferManager::new([engine.clone() as _]);
    engine.hold();
    let page = end(8, HeadMajor, CONTIGUOUS);
    let ranks: Vec<_> = (0..4).map(|_| end(2, TokenMajor, OUTER_FIRST)).collect();
    let transfer = |rank: usize, first: u32| {
        Transfer::new(&ranks[rank], &page).blocks(&[0, 1], &[2, 3]).heads(0..2, first..first + 2)
    };
    let all: Vec<_> = [0, 2, 4, 6]
        .into_iter()
        .enumerate()
        .map(|(rank, first)| manager.submit(transfer(rank, first), ()).unwrap())
        .collect();
    // Some heads that another transfer is writing, and all heads.
    assert!(refused(&manager, transfer(0, 1)).is_conflict());
    let back = Transfer::new(&page, &ranks[0]).blocks(&[3], &[5]);
    assert!(refused(&manager, back.clone().heads(6..8, 0..2)).is_conflict());
    assert!(page.hold_for_read(&[2]).unwrap_err().is_conflict());
    assert!(page.hold_for_read(&[1]).is_ok());
    let ticket = all[3].ticket();
    let after = manager.submit(back.heads(6..8, 0..2).after(&ticket), ()).unwrap();
    engine.release_all();
    for completion in all {
        end_of(completion).result.unwrap();
    }
    end_of(after).result.unwrap();
    assert_unclaimed(&page);
}

#[test]
fn heads_move_within_a_block() {
    let manager = TransferManager::new([Arc::new(SimulatedEngine::default()) as _]);
    for order in TokenOrder::ALL {
        let page = end(8, order, CONTIGUOUS);
        let mut expected = Image::of(&page, &InProcess);
        expected.transfer_heads(&expected.clone(), &[1], &[1], 0..2, [0..3, 4..7]);
        let transfer = Transfer::new(&page, &page).blocks(&[1], &[1]);
        run(&manager, transfer.clone().heads(0..3, 4..7));
        Image::of(&page, &InProcess).assert_equals(&expected, "within a block");
        let error = refused(&manager, transfer.heads(0..3, 2..5));
        assert!(matches!(error, TransferError::Overlap { source_block: 1, destination: 1 }));
    }
}

/// The cells of each pair of orders: rows, columns and the bytes of a cell.
#[test]
fn pieces_are_broken_up_only_as_far_as_necessary() {
    let cells = |from: (u32, TokenOrder), to: (u32, TokenOrder), count: u32, tokens: u32| {
        let [source, destination] = [from, to].map(|(heads, order)| {
            let config = config_with_heads(heads, order);
            let builder = LayoutConfigBuilder::from(config).page_size(tokens);
            endpoint(builder.build().unwrap(), CONTIGUOUS)
        });
        let transfer = Transfer::new(&source, &destination).blocks(&[0], &[1]);
        let plan = Planner::new().plan(&transfer.heads(0..count, 0..count)).unwrap();
        let grids = plan.grids().unwrap();
        let [grid] = **grids else { panic!("{grids:?}") };
        let whole = count == from.0 && count == to.0;
        assert_eq!(plan.run_count(), u64::try_from(plan.runs().len()).unwrap());
        assert!(whole || plan.breaks_pieces());
        (grid.rows, grid.columns, grid.bytes.get())
    };
    let (head, piece) = (6, 5 * 8 * 6);
    let block = 4 * piece;
    // The same order: all of a block at once.
    assert_eq!(cells((8, HeadMajor), (8, HeadMajor), 8, 5), (1, 1, block));
    assert_eq!(cells((8, TokenMajor), (8, TokenMajor), 8, 5), (1, 1, block));
    // Some heads: one row per token, or all tokens of these heads at once.
    assert_eq!(cells((8, TokenMajor), (2, TokenMajor), 2, 5), (5, 1, 2 * head));
    assert_eq!(cells((8, HeadMajor), (2, HeadMajor), 2, 5), (1, 1, 2 * 5 * head));
    // Another order.
    assert_eq!(cells((8, HeadMajor), (8, TokenMajor), 8, 5), (5, 8, head));
    assert_eq!(cells((8, TokenMajor), (2, HeadMajor), 2, 5), (2, 5, head));
    // One token, or one head: there is only one order.
    assert_eq!(cells((8, HeadMajor), (8, TokenMajor), 8, 1), (1, 1, 4 * 8 * head));
    assert_eq!(cells((8, HeadMajor), (8, TokenMajor), 3, 1), (1, 1, 3 * head));
    assert_eq!(cells((1, HeadMajor), (1, TokenMajor), 1, 5), (1, 1, 4 * 5 * head));
    assert_eq!(cells((8, HeadMajor), (1, TokenMajor), 1, 5), (1, 1, 5 * head));
    assert_eq!(cells((1, HeadMajor), (8, TokenMajor), 1, 5), (5, 1, head));
}

#[test]
fn wrong_numbers_of_heads_are_refused() {
    let manager = TransferManager::new([Arc::new(SimulatedEngine::default()) as _]);
    let between = |from: &Endpoint, to: &Endpoint| Transfer::new(from, to).blocks(&[0], &[1]);
    let (page, rank) = (end(8, HeadMajor, CONTIGUOUS), end(2, TokenMajor, OUTER_FIRST));

    let error = refused(&manager, between(&page, &rank));
    assert_says(&error, &["num_heads", "8 in the source", "2 in the destination", "heads"]);
    assert!(matches!(error, TransferError::ShapeMismatch { field: "num_heads", from: 8, to: 2 }));

    for (heads, side) in [([7..9, 0..2], Side::Source), ([6..8, 1..3], Side::Destination)] {
        let [read, written] = heads;
        let error = refused(&manager, between(&page, &rank).heads(read, written));
        assert!(matches!(error, TransferError::NoSuchHeads { side: s, .. } if s == side));
    }
    let error = refused(&manager, between(&page, &rank).heads(3..3, 0..0));
    assert_says(&error, &["heads 3..3", "the 8 heads of the source"]);
    let error = refused(&manager, between(&page, &rank).heads(0..3, 0..2));
    assert!(matches!(error, TransferError::UnequalHeadCounts { from: 3, to: 2 }));

    // Rows without heads are copied whole, and only in the same order.
    let rows = LayoutConfig::builder()
        .num_blocks(6)
        .num_layers(2)
        .outer_dim(2)
        .page_size(5)
        .inner_dim(24)
        .element(ElementFormat::Width(2));
    let plain = endpoint(rows.build().unwrap(), BLOCK_FIRST);
    run(&manager, between(&end(8, TokenMajor, CONTIGUOUS), &plain));
    run(&manager, between(&plain, &end(8, TokenMajor, CONTIGUOUS)));
    let error = refused(&manager, between(&page, &plain));
    assert!(matches!(error, TransferError::HeadsNotStated { side: Side::Destination }));
    assert_says(&error, &["destination", "num_heads", "token_order"]);
    let some = between(&plain, &end(8, TokenMajor, CONTIGUOUS)).heads(0..1, 0..1);
    let error = refused(&manager, some);
    assert!(matches!(error, TransferError::HeadsNotStated { side: Side::Source }));

    // Heads of different lengths.
    let wide = endpoint(rows.num_heads(4).build().unwrap(), CONTIGUOUS);
    let error = refused(&manager, between(&page, &wide));
    assert!(matches!(error, TransferError::ShapeMismatch { field: "head_dim", from: 3, to: 6 }));
}

#[test]
fn explanations_count_the_runs_of_broken_pieces() {
    let host = HostEngine::new(HostEngineOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(host) as _]);
    let (from, to) = (end(8, HeadMajor, CONTIGUOUS), end(8, TokenMajor, OUTER_FIRST));
    let transfer = Transfer::new(&from, &to).blocks(&[0, 1], &[3, 5]);
    let explanation = manager.explain(&transfer).unwrap();
    assert_eq!((explanation.pieces, explanation.runs), (2 * 4, 2 * 4 * 5 * 8));
    assert_eq!(explanation.mean_run().get(), 6);
    assert_eq!(explanation.path(), "re-layout through the cache");
    let report = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
    assert_eq!(report.explanation, explanation);
}
