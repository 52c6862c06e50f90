//! Doubly linked lists of slots, over two arrays: no allocation for an entry.

use crate::table_memory::filled;

/// No slot.
const NONE: u32 = u32::MAX;

/// The neighbours of each slot in its list. A slot is in at most one list at a time.
#[derive(Debug)]
pub(super) struct Links {
    neighbours: Box<[[u32; 2]]>,
}

/// One list: the oldest slot first.
#[derive(Debug)]
pub(super) struct List {
    oldest: u32,
    newest: u32,
    length: u32,
}

impl Links {
    pub(super) fn new(slots: u32) -> Self {
        let slots = usize::try_from(slots).unwrap_or(usize::MAX);
        Self { neighbours: filled(slots, || [NONE; 2]) }
    }

    /// The neighbour on the side of the older slots, and that on the side of the newer ones.
    fn neighbours_of(&mut self, slot: u32) -> Option<&mut [u32; 2]> {
        usize::try_from(slot).ok().and_then(|slot| self.neighbours.get_mut(slot))
    }

    fn older(&mut self, slot: u32) -> u32 {
        self.neighbours_of(slot).map_or(NONE, |[older, _]| *older)
    }

    fn newer(&mut self, slot: u32) -> u32 {
        self.neighbours_of(slot).map_or(NONE, |[_, newer]| *newer)
    }
}

impl List {
    pub(super) const fn new() -> Self {
        Self { oldest: NONE, newest: NONE, length: 0 }
    }

    pub(super) const fn len(&self) -> u32 {
        self.length
    }

    pub(super) const fn oldest(&self) -> Option<u32> {
        if self.oldest == NONE { None } else { Some(self.oldest) }
    }

    /// Adds a slot that is in no list, as the newest.
    pub(super) fn push(&mut self, links: &mut Links, slot: u32) {
        let newest = self.newest;
        let Some(own) = links.neighbours_of(slot) else { return };
        *own = [newest, NONE];
        match links.neighbours_of(newest) {
            Some([_, newer]) => *newer = slot,
            None => self.oldest = slot,
        }
        self.newest = slot;
        self.length += 1;
    }

    /// Removes a slot that is in this list.
    pub(super) fn remove(&mut self, links: &mut Links, slot: u32) {
        let (older, newer) = (links.older(slot), links.newer(slot));
        match links.neighbours_of(older) {
            Some([_, after]) => *after = newer,
            None => self.oldest = newer,
        }
        match links.neighbours_of(newer) {
            Some([before, _]) => *before = older,
            None => self.newest = older,
        }
        if let Some(own) = links.neighbours_of(slot) {
            *own = [NONE; 2];
        }
        self.length -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slots(list: &List, links: &mut Links) -> Vec<u32> {
        let mut found = Vec::new();
        let mut next = list.oldest();
        while let Some(slot) = next {
            found.push(slot);
            let newer = links.newer(slot);
            next = (newer != NONE).then_some(newer);
        }
        found
    }

    #[test]
    fn a_list_keeps_the_order_of_its_pushes() {
        let mut links = Links::new(5);
        let mut list = List::new();
        for slot in [3, 0, 4, 1] {
            list.push(&mut links, slot);
        }
        assert_eq!(slots(&list, &mut links), [3, 0, 4, 1]);
        for (removed, left) in [(0, vec![3, 4, 1]), (3, vec![4, 1]), (1, vec![4]), (4, vec![])] {
            list.remove(&mut links, removed);
            assert_eq!(slots(&list, &mut links), left);
            assert_eq!(list.len(), u32::try_from(left.len()).unwrap());
        }
        list.push(&mut links, 2);
        assert_eq!(slots(&list, &mut links), [2]);
    }
}
