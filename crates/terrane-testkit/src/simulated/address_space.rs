//! The address spaces of simulated memory.

use std::collections::BTreeMap;

use terrane_core::{Alignment, ByteCount};

/// Whether a simulated device reuses addresses, and how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reuse {
    /// Each address is used once: the space never fragments, and a stale address is never a live
    /// one.
    #[default]
    Never,
    /// A block gets the lowest addresses where it fits, as in a simple allocator. Freed addresses
    /// are reused soon, and the space fragments.
    FirstFit,
}

/// Above the 57 bits of the largest address spaces, so no device has these addresses. Aligned to
/// every alignment of a request.
const BASE: u64 = 1 << 60;

/// Addresses from [`BASE`] on.
#[derive(Debug)]
pub(super) enum AddressSpace {
    /// The next address that was never allocated.
    Endless(u64),
    /// Free ranges, with adjacent ones joined: start to length.
    FirstFit(BTreeMap<u64, u64>),
}

impl AddressSpace {
    /// Creates a space of `capacity` bytes; unlimited if addresses are never reused.
    pub(super) fn new(reuse: Reuse, capacity: ByteCount) -> Self {
        match reuse {
            Reuse::Never => Self::Endless(BASE),
            Reuse::FirstFit => {
                // Bytes beyond the largest address cannot be allocated.
                let length = capacity.get().min(u64::MAX - BASE);
                Self::FirstFit(BTreeMap::from_iter((length > 0).then_some((BASE, length))))
            }
        }
    }

    /// Returns the largest free range, if a total of `available` bytes is free.
    pub(super) fn largest(&self, available: ByteCount) -> ByteCount {
        match self {
            Self::Endless(_) => available,
            Self::FirstFit(free) => ByteCount::new(free.values().copied().max().unwrap_or(0)),
        }
    }

    /// Allocates `length` bytes; `length` is not zero.
    pub(super) fn take(&mut self, length: u64, alignment: Alignment) -> Option<u64> {
        match self {
            Self::Endless(next) => {
                let address = next.checked_next_multiple_of(alignment.get())?;
                *next = address.checked_add(length)?;
                Some(address)
            }
            Self::FirstFit(free) => {
                let (start, end, address) = free.iter().find_map(|(&start, &available)| {
                    let (end, address) =
                        (start + available, start.checked_next_multiple_of(alignment.get())?);
                    (address.checked_add(length)? <= end).then_some((start, end, address))
                })?;
                free.remove(&start);
                let after = address + length;
                for (start, end) in [(start, address), (after, end)] {
                    if start < end {
                        free.insert(start, end - start);
                    }
                }
                Some(address)
            }
        }
    }

    /// Returns a range to the space.
    pub(super) fn give_back(&mut self, address: u64, length: u64) {
        let Self::FirstFit(free) = self else { return };
        let (mut start, mut end) = (address, address + length);
        if let Some((&before, &its_length)) = free.range(..address).next_back()
            && before + its_length == start
        {
            free.remove(&before);
            start = before;
        }
        if let Some(its_length) = free.remove(&end) {
            end += its_length;
        }
        free.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn first_fit_allocates_disjoint_ranges_and_joins_them_when_freed(
            steps in prop::collection::vec((1_u64..200, 0_u32..7, any::<prop::sample::Index>()), 1..80),
        ) {
            let mut space = AddressSpace::new(Reuse::FirstFit, ByteCount::new(4096));
            let mut live: Vec<(u64, u64)> = Vec::new();
            for (length, exponent, pick) in steps {
                let alignment = Alignment::new(1 << exponent).unwrap();
                if length % 3 == 0 && !live.is_empty() {
                    let (address, length) = live.swap_remove(pick.index(live.len()));
                    space.give_back(address, length);
                } else if let Some(address) = space.take(length, alignment) {
                    prop_assert_eq!(address % alignment.get(), 0);
                    prop_assert!(address >= BASE && address + length <= BASE + 4096);
                    for &(other, its_length) in &live {
                        prop_assert!(address + length <= other || other + its_length <= address);
                    }
                    live.push((address, length));
                }
            }
            for (address, length) in live {
                space.give_back(address, length);
            }
            prop_assert_eq!(space.largest(ByteCount::ZERO), ByteCount::new(4096));
        }
    }
}
