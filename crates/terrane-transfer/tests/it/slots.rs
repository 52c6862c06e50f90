//! Owned block ids: their owners, and when they are free again.

use std::collections::BTreeSet;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::thread;

use proptest::prelude::*;
use terrane_core::{Allocate, Region, RegionRequest};
use terrane_layout::LayoutBuilder;
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::Fault;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::process::{in_child, in_fork};
use terrane_transfer::{Endpoint, Hold, SlotSet, Slots, SlotsError, Ticket, TransferError};

use crate::support::*;

fn blocks(num_blocks: u32) -> Endpoint {
    endpoint(config(num_blocks), CONTIGUOUS)
}

#[test]
fn ids_are_allocated_lowest_first_and_all_or_none() {
    let slots = Slots::new(&blocks(8)).unwrap();
    let first = slots.take(3).unwrap();
    let second = slots.take(2).unwrap();
    assert_eq!((&first[..], &second[..]), (&[0, 1, 2][..], &[3, 4][..]));
    drop(first);
    let error = slots.take(7).unwrap_err();
    let expected = SlotsError::Exhausted { requested: 7, free: 6, in_flight: 0, total: 8 };
    assert_eq!(error, expected);
    assert!(error.to_string().contains("6 of 8 are free"), "{error}");
    assert_eq!(slots.take(6).unwrap()[..], [0, 1, 2, 5, 6, 7]);
    assert_eq!((slots.free(), slots.total()), (6, 8));
    assert!(slots.take(0).unwrap().is_empty());
}

#[test]
fn take_up_to_returns_at_most_the_free_ids() {
    let slots = Slots::of_range(&blocks(8), 2..6).unwrap();
    let taken = slots.take_up_to(3);
    assert_eq!(taken[..], [2, 3, 4]);
    assert_eq!(slots.take_up_to(usize::MAX)[..], [5]);
    assert_eq!((slots.free(), slots.total()), (1, 4));
    let rest = slots.take_up_to(9);
    assert!(slots.take_up_to(9).is_empty());
    drop((taken, rest));
}

#[test]
fn a_block_has_one_allocator_at_a_time() {
    let end = blocks(8);
    let low = Slots::of_range(&end, 0..4).unwrap();
    let high = Slots::of_range(&end, 4..8).unwrap();
    let error = Slots::of_range(&end, 3..5).unwrap_err();
    assert_eq!(error, SlotsError::InUse { blocks: 3..5, owned: 0..4 });
    for range in [3..9, 4..4, Range { start: 7, end: 3 }] {
        let refused = Slots::of_range(&end, range.clone()).unwrap_err();
        assert_eq!(refused, SlotsError::NoSuchBlocks { blocks: range, num_blocks: 8 });
    }
    // A set keeps its allocator alive.
    let taken = low.take(1).unwrap();
    drop((low, high));
    assert!(Slots::new(&end).is_err());
    drop(taken);
    assert_eq!(Slots::new(&end).unwrap().free(), 8);
}

#[test]
fn sets_are_split_and_joined_and_every_id_has_one_owner() {
    let slots = Slots::new(&blocks(8)).unwrap();
    let mut all = slots.take(6).unwrap();
    let mut tail = all.split_off(4);
    assert_eq!((&all[..], &tail[..]), (&[0, 1, 2, 3][..], &[4, 5][..]));
    assert!(all.split_off(4).is_empty() && all.split_off(100).is_empty());
    tail.append(&mut all).unwrap();
    assert_eq!((&tail[..], all.len()), (&[4, 5, 0, 1, 2, 3][..], 0));
    let mut each = tail.each();
    let first = each.next().unwrap();
    let second = each.next().unwrap();
    assert_eq!((&first[..], &second[..]), (&[4][..], &[5][..]));
    assert_eq!(slots.free(), 2);
    drop(each);
    assert_eq!(slots.free(), 6);
    drop((first, second));
    assert_eq!(slots.free(), 8);
}

#[test]
fn sets_of_two_allocators_are_not_joined() {
    let end = blocks(8);
    let (low, high) = (Slots::of_range(&end, 0..4).unwrap(), Slots::of_range(&end, 4..8).unwrap());
    let (mut one, mut other) = (low.take(2).unwrap(), high.take(2).unwrap());
    assert_eq!(one.append(&mut other), Err(SlotsError::OtherAllocator));
    assert_eq!((&one[..], &other[..]), (&[0, 1][..], &[4, 5][..]));
}

#[test]
fn ids_are_free_after_the_end_of_a_transfer_however_it_ends() {
    for fails in [false, true] {
        let rig = Rig::new(8);
        rig.engine.hold();
        if fails {
            rig.engine.fail_next(Fault::Engine);
        }
        let (from, to) = (Slots::new(&rig.source).unwrap(), Slots::new(&rig.destination).unwrap());
        let (read, written) = (from.take(3).unwrap(), to.take(3).unwrap());
        let completion = rig.manager.submit(rig.transfer(&read, &written), written).unwrap();
        read.free_after(&completion.ticket());
        assert_eq!((from.free(), to.free()), (5, 5));
        assert_eq!(from.take(5).unwrap()[..], [3, 4, 5, 6, 7]);
        rig.engine.release_all();
        let outcome = end_of(completion);
        assert_eq!(outcome.result.is_err(), fails);
        // They are free before the outcome is available.
        assert_eq!((from.free(), to.free()), (8, 5));
        drop(outcome.guard);
        assert_eq!(to.free(), 8);
    }
}

#[test]
fn ids_are_free_at_once_after_a_transfer_that_has_ended() {
    let rig = Rig::new(8);
    let slots = Slots::new(&rig.source).unwrap();
    let set = slots.take(2).unwrap();
    let completion = rig.manager.submit(rig.transfer(&set, &[0, 1]), ()).unwrap();
    let ticket = completion.ticket();
    end_of(completion).result.unwrap();
    set.free_after(&ticket);
    assert_eq!(slots.free(), 8);
}

#[test]
fn ids_that_several_transfers_use_are_free_after_the_last_of_them() {
    let rig = Rig::new(8);
    rig.engine.hold();
    let slots = Slots::new(&rig.source).unwrap();
    let set = slots.take(2).unwrap();
    let submit = |to: &[u32]| rig.manager.submit(rig.transfer(&set, to), ()).unwrap();
    let (one, other) = (submit(&[0, 1]), submit(&[2, 3]));
    set.free_after_all(&[one.ticket(), other.ticket()]);
    rig.engine.release(1);
    end_of(one).result.unwrap();
    assert_eq!(slots.free(), 6);
    rig.engine.release_all();
    end_of(other).result.unwrap();
    assert_eq!(slots.free(), 8);
    let none = slots.take(1).unwrap();
    none.free_after_all(&[]);
    assert_eq!(slots.free(), 8);
}

#[test]
fn ids_of_a_dropped_set_are_not_allocated_while_a_transfer_uses_them() {
    let rig = Rig::new(4);
    rig.engine.hold();
    let slots = Slots::new(&rig.source).unwrap();
    let set = slots.take(3).unwrap();
    let completion = rig.manager.submit(rig.transfer(&set[1..], &[0, 1]), ()).unwrap();
    drop(set);
    assert_eq!(slots.free(), 2);
    assert_eq!(slots.take_up_to(4)[..], [0, 3]);
    let error = slots.take(3).unwrap_err();
    assert_eq!(error, SlotsError::Exhausted { requested: 3, free: 2, in_flight: 2, total: 4 });
    rig.engine.release_all();
    end_of(completion).result.unwrap();
    assert_eq!(slots.take(4).unwrap()[..], [0, 1, 2, 3]);
}

#[test]
fn ids_of_an_orphaned_copy_are_free_once_it_has_ended() {
    let rig = Rig::new(4);
    rig.engine.fail_next(Fault::Hang);
    let slots = Slots::new(&rig.destination).unwrap();
    let set = slots.take(2).unwrap();
    let completion = rig.manager.submit(rig.transfer(&[0, 1], &set), ()).unwrap();
    while rig.engine.hung() == 0 {
        thread::yield_now();
    }
    set.free_after(&completion.ticket());
    let [source, destination] = [&rig.source, &rig.destination].map(Endpoint::orphaned_claims);
    let orphaned = || [&source, &destination].map(|claims| [0, 1, 2].map(|id| claims.has(id)));
    assert_eq!(orphaned(), [[false; 3]; 2]);
    rig.engine.orphan_hung();
    end_of(completion).result.unwrap_err();
    assert_eq!(orphaned(), [[true, true, false]; 2]);
    let ended = || [source.ended(), destination.ended()];
    assert_eq!(ended(), [0; 2]);
    assert_eq!((slots.free(), &slots.take_up_to(4)[..]), (2, &[2, 3][..]));
    rig.engine.end_orphaned();
    assert_eq!((orphaned(), ended()), ([[false; 3]; 2], [1; 2]));
    assert_eq!(slots.take(4).unwrap().len(), 4);
}

#[test]
fn groups_share_their_block_ids() {
    let bytes = RegionRequest::new(config(4).total_bytes());
    let region = Region::new(HeapAllocator::system().allocate(&bytes).unwrap());
    let over = || {
        let layout = LayoutBuilder::new(config(4)).fully_contiguous().adopt([region.clone()]);
        layout.unregistered().build().unwrap()
    };
    let groups = Endpoint::of_groups([over(), over()]).unwrap();
    let slots = Slots::new(&groups[0]).unwrap();
    assert!(matches!(Slots::new(&groups[1]), Err(SlotsError::InUse { .. })));
    let set = slots.take(1).unwrap();
    let hold = groups[1].hold_for_read(&set).unwrap();
    drop(set);
    assert_eq!(slots.free(), 3);
    drop(hold);
    assert_eq!(slots.free(), 4);
}

#[test]
fn a_set_outlives_its_allocator_and_keeps_the_endpoint() {
    let end = blocks(4);
    let weak = end.downgrade();
    let slots = Slots::new(&end).unwrap();
    let set = slots.take(2).unwrap();
    drop((end, slots));
    assert!(!weak.has_gone());
    drop(set);
    assert!(weak.has_gone());
}

#[test]
fn a_leaked_set_leaks_its_ids_only() {
    let slots = Slots::new(&blocks(4)).unwrap();
    let _leaked = ManuallyDrop::new(slots.take(2).unwrap());
    assert_eq!(slots.free(), 2);
    assert_eq!(slots.take(2).unwrap()[..], [2, 3]);
}

#[test]
fn a_forked_process_allocates_and_frees_no_ids() {
    in_child("slots::a_forked_process_allocates_and_frees_no_ids", || {
        let end = blocks(4);
        let slots = Slots::new(&end).unwrap();
        let set = slots.take(2).unwrap();
        let hold = end.hold_for_read(&[3]).unwrap();
        let ticket = hold.ticket();
        in_fork(|| {
            assert!(matches!(slots.take(1), Err(SlotsError::Forked(_))));
            assert!(matches!(Slots::new(&end), Err(SlotsError::Forked(_))));
            assert!(slots.take_up_to(1).is_empty());
            assert_eq!(slots.free(), 0);
            set.free_after(&ticket);
            drop(slots.clone());
        });
        drop(hold);
    });
}

#[test]
fn threads_never_have_the_same_id() {
    let slots = Slots::new(&blocks(64)).unwrap();
    thread::scope(|scope| {
        for thread in 0..4_usize {
            let slots = &slots;
            scope.spawn(move || {
                for round in 0..500_usize {
                    let set = slots.take_up_to(1 + (thread + round) % 16);
                    // A hold fails if another hold has the block.
                    let hold = slots.endpoint().hold_for_write(&set).unwrap();
                    drop(set);
                    drop(hold);
                }
            });
        }
    });
    assert_eq!(slots.free(), 64);
}

/// A step of the model test. Its numbers choose among the existing sets and holds.
#[derive(Clone, Debug)]
enum Step {
    Take(usize),
    TakeUpTo(usize),
    Drop(prop::sample::Index),
    Split(prop::sample::Index, usize),
    Append(prop::sample::Index, prop::sample::Index),
    Each(prop::sample::Index),
    /// Uses some ids of a set.
    Hold(prop::sample::Index, bool),
    EndHold(prop::sample::Index),
    FreeAfter(prop::sample::Index, prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    use prop::sample::Index;
    let index = any::<Index>;
    let step = prop_oneof![
        (0_usize..9).prop_map(Step::Take),
        (0_usize..9).prop_map(Step::TakeUpTo),
        index().prop_map(Step::Drop),
        (index(), 0_usize..6).prop_map(|(set, at)| Step::Split(set, at)),
        (index(), index()).prop_map(|(one, other)| Step::Append(one, other)),
        index().prop_map(Step::Each),
        (index(), any::<bool>()).prop_map(|(set, writes)| Step::Hold(set, writes)),
        index().prop_map(Step::EndHold),
        (index(), index()).prop_map(|(set, hold)| Step::FreeAfter(set, hold)),
    ];
    prop::collection::vec(step, 1..60)
}

/// The state of the model: the holds, their ids, and the ids that are freed after them.
struct Holding {
    hold: Hold,
    ticket: Ticket,
    ids: Vec<u32>,
    kept: Vec<u32>,
}

#[derive(Default)]
struct Model {
    sets: Vec<SlotSet>,
    holds: Vec<Holding>,
}

impl Model {
    /// The ids that can be allocated: no set owns them, no ticket keeps them, and no hold uses
    /// them.
    fn free(&self, total: u32) -> BTreeSet<u32> {
        let owned = self.sets.iter().flatten().copied();
        let used = self.holds.iter().flat_map(|it| it.ids.iter().chain(&it.kept)).copied();
        let taken: BTreeSet<u32> = owned.chain(used).collect();
        (0..total).filter(|id| !taken.contains(id)).collect()
    }

    fn run(&mut self, step: Step, slots: &Slots, total: u32) {
        let free: Vec<u32> = self.free(total).into_iter().collect();
        match step {
            Step::Take(count) => match slots.take(count) {
                Ok(set) => {
                    assert_eq!(set[..], free[..count]);
                    self.sets.push(set);
                }
                Err(SlotsError::Exhausted { requested, free: left, .. }) => {
                    assert_eq!((requested, left), (count, free.len()));
                    assert!(count > left);
                }
                Err(other) => panic!("{other}"),
            },
            Step::TakeUpTo(most) => {
                let set = slots.take_up_to(most);
                assert_eq!(set[..], free[..most.min(free.len())]);
                self.sets.push(set);
            }
            Step::EndHold(at) if !self.holds.is_empty() => {
                let Holding { hold, .. } = self.holds.swap_remove(at.index(self.holds.len()));
                drop(hold);
            }
            _ if self.sets.is_empty() => {}
            Step::Drop(at) => drop(self.sets.swap_remove(at.index(self.sets.len()))),
            Step::Split(at, position) => {
                let at = at.index(self.sets.len());
                let rest = self.sets[at].split_off(position);
                self.sets.push(rest);
            }
            Step::Append(one, other) => {
                let mut moved = self.sets.swap_remove(other.index(self.sets.len()));
                match self.sets.len() {
                    0 => self.sets.push(moved),
                    sets => {
                        self.sets[one.index(sets)].append(&mut moved).unwrap();
                        assert!(moved.is_empty());
                    }
                }
            }
            Step::Each(at) => {
                let set = self.sets.swap_remove(at.index(self.sets.len()));
                self.sets.extend(set.each());
            }
            Step::Hold(at, writes) => {
                let ids = self.sets[at.index(self.sets.len())].to_vec();
                let end = slots.endpoint();
                let hold = if writes { end.hold_for_write(&ids) } else { end.hold_for_read(&ids) };
                match hold {
                    Ok(hold) => {
                        let ticket = hold.ticket();
                        self.holds.push(Holding { hold, ticket, ids, kept: Vec::new() });
                    }
                    // The owner of an id may use it twice.
                    Err(TransferError::Conflict { .. }) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Step::FreeAfter(at, hold) if !self.holds.is_empty() => {
                let set = self.sets.swap_remove(at.index(self.sets.len()));
                let hold = hold.index(self.holds.len());
                let holding = &mut self.holds[hold];
                holding.kept.extend(&set);
                set.free_after(&holding.ticket);
            }
            Step::EndHold(_) | Step::FreeAfter(..) => {}
        }
    }
}

proptest! {
    #[test]
    fn ids_are_free_if_no_set_no_ticket_and_no_hold_has_them(steps in steps()) {
        const BLOCKS: u32 = 16;
        let slots = Slots::new(&blocks(BLOCKS)).unwrap();
        let mut model = Model::default();
        for step in steps {
            model.run(step, &slots, BLOCKS);
            prop_assert_eq!(slots.free(), model.free(BLOCKS).len());
        }
        drop(model);
        prop_assert_eq!(slots.free(), 16);
    }
}

#[test]
fn an_id_in_use_by_code_without_ownership_is_not_allocated() {
    let end = blocks(4);
    let before = end.hold_for_write(&[0]).unwrap();
    let slots = Slots::new(&end).unwrap();
    let later = end.hold_for_read(&[2]).unwrap();
    let set = slots.take(2).unwrap();
    assert_eq!(*set, [1, 3]);
    let exhausted = slots.take(1).unwrap_err();
    let expected = SlotsError::Exhausted { requested: 1, free: 0, in_flight: 2, total: 4 };
    assert_eq!(exhausted, expected);
    drop((before, later));
    assert_eq!(*slots.take(2).unwrap(), [0, 2]);
}

#[test]
fn another_allocator_does_not_allocate_an_id_in_use() {
    let end = blocks(3);
    let slots = Slots::new(&end).unwrap();
    let set = slots.take(2).unwrap();
    let reading = end.hold_for_read(&set).unwrap();
    drop((set, slots));
    let slots = Slots::new(&end).unwrap();
    assert_eq!(*slots.take_up_to(3), [2]);
    drop(reading);
    assert_eq!(slots.take(3).unwrap().len(), 3);
}
