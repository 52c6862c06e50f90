//! Sorts pairs of block ids by one of the two.

use terrane_core::convert::to_usize;

/// Sorts pairs, and reuses its buffers.
#[derive(Debug, Default)]
pub(crate) struct PairSorter {
    /// The other id of each pair, by id.
    table: Vec<u32>,
    pairs: Vec<u64>,
}

/// No block: ids are below the number of blocks, which has 32 bits as well.
const NONE: u32 = u32::MAX;

/// At most this many pairs are sorted by [counting](sort_few).
const FEW: usize = 24;
/// The keys that one vector instruction of every processor compares.
const LANES: usize = 4;

/// A table of all ids is faster with at most this many ids per pair. A table entry costs at most a
/// nanosecond. Finding a position by comparisons costs 10 to 20.
const IDS_PER_PAIR: usize = 8;

impl PairSorter {
    /// Appends the pairs to `sorted`, `keys` first, in ascending order of the keys. Pairs of one
    /// key are in ascending order of their values. All keys are below `ids`.
    pub(crate) fn sort(
        &mut self,
        keys: &[u32],
        values: &[u32],
        ids: u32,
        [to_keys, to_values]: [&mut Vec<u32>; 2],
    ) {
        if keys.len() <= FEW && sort_few(keys, values, [to_keys, to_values]) {
            return;
        }
        let ids = to_usize(ids.into());
        if ids / IDS_PER_PAIR > keys.len() || !self.spread(keys, values, ids) {
            // Sorting is twice as fast with each pair packed into one number.
            let pairs = keys.iter().zip(values);
            let packed = pairs.map(|(&key, &value)| (u64::from(key) << 32) | u64::from(value));
            self.pairs.extend(packed);
            sort_packed(&mut self.pairs, [to_keys, to_values]);
            return self.pairs.clear();
        }
        if ids == keys.len() {
            // Every id has a pair.
            to_keys.extend((0_u32..).zip(&self.table).map(|(key, _)| key));
            to_values.extend_from_slice(&self.table);
            return;
        }
        to_keys.reserve(keys.len());
        to_values.reserve(keys.len());
        for (key, &value) in (0_u32..).zip(&self.table) {
            if value != NONE {
                to_keys.push(key);
                to_values.push(value);
            }
        }
    }

    /// Writes each value at its key. Returns whether all keys are distinct.
    fn spread(&mut self, keys: &[u32], values: &[u32], ids: usize) -> bool {
        self.table.clear();
        self.table.resize(ids, NONE);
        keys.iter().zip(values).all(|(&key, &value)| {
            let place = self.table.get_mut(to_usize(key.into()));
            place.is_some_and(|place| std::mem::replace(place, value) == NONE)
        })
    }
}

/// Sorts few pairs with distinct keys, and appends them to both lists. Returns whether the keys are
/// distinct; nothing is appended otherwise.
///
/// A key's place is the number of smaller keys. Counting them has no branch that depends on the
/// keys. So it takes half the time of a sort by comparisons.
fn sort_few(keys: &[u32], values: &[u32], [to_keys, to_values]: [&mut Vec<u32>; 2]) -> bool {
    let mut padded = [[NONE; LANES]; FEW / LANES];
    let places = padded.as_flattened_mut().iter_mut();
    places.zip(keys).for_each(|(place, &key)| *place = key);
    let vectors = padded.get(..keys.len().div_ceil(LANES)).unwrap_or_default();
    let (mut sorted_keys, mut sorted_values) = ([NONE; FEW], [0; FEW]);
    for (&key, &value) in keys.iter().zip(values) {
        let mut smaller = [0_u32; LANES];
        for vector in vectors {
            smaller.iter_mut().zip(vector).for_each(|(sum, &other)| *sum += u32::from(other < key));
        }
        let place = to_usize(smaller.iter().sum::<u32>().into());
        let places = (sorted_keys.get_mut(place), sorted_values.get_mut(place));
        if let (Some(to_key), Some(to_value)) = places {
            (*to_key, *to_value) = (key, value);
        }
    }
    let sorted_keys = sorted_keys.get(..keys.len()).unwrap_or_default();
    let sorted_values = sorted_values.get(..keys.len()).unwrap_or_default();
    // Equal keys have one place, so another place is empty.
    let is_distinct = sorted_keys.iter().fold(true, |found, &key| found & (key != NONE));
    if is_distinct {
        to_keys.extend_from_slice(sorted_keys);
        to_values.extend_from_slice(sorted_values);
    }
    is_distinct
}

/// Sorts pairs that are packed with the key in the upper half, and appends them to both lists.
fn sort_packed(pairs: &mut [u64], [to_keys, to_values]: [&mut Vec<u32>; 2]) {
    pairs.sort_unstable();
    let half = |bits: u64| u32::try_from(bits & u64::from(u32::MAX)).unwrap_or(u32::MAX);
    to_keys.extend(pairs.iter().map(|&pair| half(pair >> 32)));
    to_values.extend(pairs.iter().map(|&pair| half(pair)));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sorted(sorter: &mut PairSorter, pairs: &[(u32, u32)], ids: u32) -> Vec<(u32, u32)> {
        let (keys, values): (Vec<u32>, Vec<u32>) = pairs.iter().copied().unzip();
        let [mut to_keys, mut to_values] = [Vec::new(), Vec::new()];
        sorter.sort(&keys, &values, ids, [&mut to_keys, &mut to_values]);
        to_keys.into_iter().zip(to_values).collect()
    }

    proptest! {
        /// Few and many ids, so that both methods are covered, with and without duplicate keys.
        #[test]
        fn pairs_are_sorted_as_by_comparison(
            ids in 1_u32..400,
            pairs in proptest::collection::vec((any::<u32>(), 0..u32::MAX), 0..100),
        ) {
            let pairs: Vec<(u32, u32)> =
                pairs.into_iter().map(|(key, value)| (key % ids, value)).collect();
            let mut expected = pairs.clone();
            expected.sort_unstable();
            let mut sorter = PairSorter::default();
            prop_assert_eq!(sorted(&mut sorter, &pairs, ids), expected.clone());
            // Leftover data of the first sort has no effect.
            prop_assert_eq!(sorted(&mut sorter, &pairs, ids), expected);
        }
    }

    #[test]
    fn unique_keys_by_table() {
        let mut sorter = PairSorter::default();
        let descending: Vec<(u32, u32)> = (0..30).map(|id| (2 * id, id % 3)).rev().collect();
        let ascending: Vec<(u32, u32)> = descending.iter().copied().rev().collect();
        assert_eq!(sorted(&mut sorter, &descending, 60), ascending);
        assert!(sorter.pairs.capacity() == 0, "nothing was compared");
    }
}
