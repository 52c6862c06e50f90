//! Claims on one table.

use proptest::prelude::*;

use super::*;
use crate::side::Side;

fn used<'a>(access: Access, blocks: &'a [u32], layers: Range<u32>) -> BlockUse<'a> {
    BlockUse { access, blocks, group: 0, area: Area { layers, heads: 0..1, tokens: ALL_TOKENS } }
}

fn claim(table: &HazardTable, holder: &Ticket, used: &BlockUse<'_>) -> Claim {
    let mut locked = table.lock();
    let _is_free = locked.count(used);
    locked.claim(holder, used)
}

fn no_predecessor(_: TransferId) -> bool {
    false
}

#[test]
fn readers_share_and_writers_do_not() {
    let table = HazardTable::new(8);
    let ticket = Ticket::new([]);
    let reading = claim(&table, &ticket, &used(Access::Read, &[3, 1], 0..4));
    let mut locked = table.lock();
    assert!(locked.conflicts(&used(Access::Read, &[1, 2, 3], 0..4), &no_predecessor).is_empty());
    let conflicts = locked.conflicts(&used(Access::Write, &[1, 2], 0..4), &no_predecessor);
    let (side, holder) = (Side::Destination, ticket.id());
    let (wanted, held) = (Access::Write, Access::Read);
    let expected = BlockConflict { side, block: 1, wanted, held, holder };
    assert_eq!(conflicts, [expected]);
    drop(locked);
    drop(reading);
    assert!(table.lock().conflicts(&used(Access::Write, &[1], 0..4), &no_predecessor).is_empty());
}

#[test]
fn a_claim_that_is_taken_back_leaves_no_count() {
    let table = HazardTable::new(8);
    let reading = claim(&table, &Ticket::new([]), &used(Access::Read, &[5, 1], 0..4));
    for blocks in [&[7, 1][..], &[0, 1, 2]] {
        let wanted = used(Access::Write, blocks, 0..4);
        let mut locked = table.lock();
        assert!(!locked.count(&wanted));
        locked.uncount(&wanted);
        assert!(!locked.are_unclaimed(&[1]));
        assert!(locked.are_unclaimed(&[0, 2, 7]));
    }
    drop(reading);
    assert!(table.lock().are_unclaimed(&[0, 1, 2, 3, 4, 5, 6, 7]));
}

#[test]
fn other_layers_of_a_block_do_not_conflict() {
    let table = HazardTable::new(2);
    let _writing = claim(&table, &Ticket::new([]), &used(Access::Write, &[0], 0..2));
    let mut locked = table.lock();
    assert!(locked.conflicts(&used(Access::Write, &[0], 2..4), &no_predecessor).is_empty());
    assert_eq!(locked.conflicts(&used(Access::Read, &[0], 1..3), &no_predecessor).len(), 1);
}

#[test]
fn other_heads_of_a_block_do_not_conflict() {
    let of_heads = |heads| {
        let area = Area { layers: 0..2, heads, tokens: ALL_TOKENS };
        BlockUse { area, ..used(Access::Write, &[0], 0..2) }
    };
    let table = HazardTable::new(2);
    let _writing = claim(&table, &Ticket::new([]), &of_heads(2..4));
    let mut locked = table.lock();
    assert!(locked.conflicts(&of_heads(0..2), &no_predecessor).is_empty());
    assert!(locked.conflicts(&of_heads(4..8), &no_predecessor).is_empty());
    assert_eq!(locked.conflicts(&of_heads(3..5), &no_predecessor).len(), 1);
    assert_eq!(locked.conflicts(&of_heads(0..8), &no_predecessor).len(), 1);
}

#[test]
fn any_layers_and_heads_of_other_groups_conflict() {
    let of_group = |access, group, layers| BlockUse { group, ..used(access, &[0], layers) };
    let table = HazardTable::of_groups(2, [(4, 1), (4, 1)]);
    let writing = claim(&table, &Ticket::new([]), &of_group(Access::Write, 0, 0..2));
    let mut locked = table.lock();
    let mut conflicts = |used| locked.conflicts(&used, &no_predecessor).len();
    assert_eq!(conflicts(of_group(Access::Write, 0, 2..4)), 0);
    assert_eq!(conflicts(of_group(Access::Write, 1, 2..4)), 1);
    assert_eq!(conflicts(of_group(Access::Read, 1, 2..4)), 1);
    drop(locked);
    drop(writing);
    let _reading = claim(&table, &Ticket::new([]), &of_group(Access::Read, 0, 0..2));
    let mut locked = table.lock();
    let mut conflicts = |used| locked.conflicts(&used, &no_predecessor).len();
    assert_eq!(conflicts(of_group(Access::Read, 1, 0..4)), 0);
    assert_eq!(conflicts(of_group(Access::Write, 1, 2..4)), 1);
}

#[test]
fn a_transfer_that_runs_after_the_holder_may_claim() {
    let table = HazardTable::new(1);
    let first = Ticket::new([]);
    let _claim = claim(&table, &first, &used(Access::Write, &[0], 0..1));
    let after_first = |id| id == first.id();
    let wanted = used(Access::Write, &[0], 0..1);
    assert!(table.lock().conflicts(&wanted, &after_first).is_empty());
    assert_eq!(table.lock().conflicts(&wanted, &no_predecessor).len(), 1);
}

#[test]
fn a_block_read_twice_by_one_claim_is_released_once_for_each() {
    let table = HazardTable::new(1);
    let claim = claim(&table, &Ticket::new([]), &used(Access::Read, &[0, 0], 0..1));
    drop(claim);
    assert!(table.lock().conflicts(&used(Access::Write, &[0], 0..1), &no_predecessor).is_empty());
}

#[test]
fn conflicts_have_the_order_of_the_wanted_blocks() {
    let table = HazardTable::new(16);
    let tickets = [(); 2].map(|()| Ticket::new([]));
    let large: Vec<u32> = (0..16).rev().collect();
    let [small, large] = [(&tickets[0], &[6, 2, 6][..]), (&tickets[1], &large[..])]
        .map(|(ticket, blocks)| claim(&table, ticket, &used(Access::Read, blocks, 0..1)));
    let wanted = used(Access::Write, &[9, 6, 2, 11, 6], 0..1);
    let found = table.lock().conflicts(&wanted, &no_predecessor);
    let found: Vec<_> = found.iter().map(|found| (found.block, found.holder)).collect();
    let [of_small, of_large] = tickets.each_ref().map(Ticket::id);
    let expected = [
        (9, of_large),
        (6, of_small),
        (6, of_large),
        (2, of_small),
        (2, of_large),
        (11, of_large),
        (6, of_small),
        (6, of_large),
    ];
    assert_eq!(found, expected);
    drop((small, large));
}

proptest! {
    /// Ranges, near-ranges and lists are counted like a plain list.
    #[test]
    fn blocks_are_claimed_and_released_whether_they_are_a_range_or_not(
        first in 0_u32..12,
        count in 0_u32..12,
        changed in proptest::option::of((0_usize..12, 0_u32..24)),
        writes in any::<bool>(),
    ) {
        let mut blocks: Vec<u32> = (first..first + count).collect();
        if let Some((place, block)) = changed
            && let Some(at) = blocks.get_mut(place)
        {
            *at = block;
        }
        let access = if writes { Access::Write } else { Access::Read };
        let table = HazardTable::new(24);
        let claim = claim(&table, &Ticket::new([]), &used(access, &blocks, 0..1));
        for wanted in [Access::Read, Access::Write] {
            let excludes = writes || wanted == Access::Write;
            for block in 0..24 {
                let found = table.lock().conflicts(&used(wanted, &[block], 0..1), &no_predecessor);
                prop_assert_eq!(!found.is_empty(), excludes && blocks.contains(&block));
            }
            // Also with other claims around them.
            let all: Vec<u32> = (0..24).collect();
            let found = table.lock().conflicts(&used(wanted, &all, 0..1), &no_predecessor);
            let mut distinct = blocks.clone();
            distinct.sort_unstable();
            distinct.dedup();
            prop_assert_eq!(found.len(), if excludes { distinct.len() } else { 0 });
        }
        drop(claim);
        let all: Vec<u32> = (0..24).collect();
        let found = table.lock().conflicts(&used(Access::Write, &all, 0..1), &no_predecessor);
        prop_assert!(found.is_empty());
    }
}
