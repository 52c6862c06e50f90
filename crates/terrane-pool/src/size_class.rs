//! Size classes: the lengths that a pool keeps, and the class that serves a request.

use terrane_core::convert::{to_u64, to_usize};
use terrane_core::{Alignment, ByteCount};

use crate::error::PoolError;

/// How a pool rounds the sizes of its blocks.
///
/// Finer classes waste less memory on rounding, but a freed block fits the next request less often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SizeClasses {
    /// Powers of two: up to 100 % waste, and the fewest classes.
    PowerOfTwo,
    /// Four steps per doubling: up to 25 % waste.
    Steps4,
    /// Eight steps per doubling: up to 12.5 % waste. The default.
    #[default]
    Steps8,
    /// One class of blocks of exactly `stride` bytes, obtained `count` at a time in one region.
    ///
    /// A slab is freed to the upstream as a whole, when all of its blocks are cached. Larger
    /// requests are passed to the upstream.
    ExactSlab {
        /// The length of a block in bytes; a multiple of the pool's alignment.
        stride: ByteCount,
        /// The number of blocks in a slab.
        count: u32,
    },
}

/// The classes of one pool, as a table.
#[derive(Debug)]
pub(crate) struct ClassTable {
    rounding: Rounding,
    sizes: Box<[u64]>,
}

#[derive(Clone, Copy, Debug)]
enum Rounding {
    /// 2^`step_bits` classes per doubling. `first` is the raw number of the smallest class.
    Geometric {
        step_bits: u32,
        smallest: u64,
        largest: u64,
        first: usize,
    },
    Slab {
        stride: u64,
        count: u32,
    },
}

impl ClassTable {
    pub(crate) fn new(
        classes: SizeClasses,
        smallest: ByteCount,
        largest: ByteCount,
        alignment: Alignment,
    ) -> Result<Self, PoolError> {
        let step_bits = match classes {
            SizeClasses::PowerOfTwo => 0,
            SizeClasses::Steps4 => 2,
            SizeClasses::Steps8 => 3,
            SizeClasses::ExactSlab { stride, count } => {
                return Self::slab(stride, count, alignment);
            }
        };
        let (least, most) = (smallest.get(), largest.get());
        // Eight steps per doubling are whole bytes from 16 bytes on, but not for smaller sizes.
        if !least.is_power_of_two() || least < 16 || least > most || most > 1 << 48 {
            return Err(PoolError::InvalidClassRange { smallest, largest });
        }
        let first = raw_class(least, step_bits);
        let last = raw_class(most, step_bits);
        let sizes: Box<[u64]> = (first..=last).map(|raw| raw_size(raw, step_bits)).collect();
        let largest = sizes.last().copied().unwrap_or(most);
        let rounding = Rounding::Geometric { step_bits, smallest: least, largest, first };
        Ok(Self { rounding, sizes })
    }

    /// Rounds the size of each class up to a multiple of the upstream's granule. A smaller size
    /// would count as less than the memory that the upstream uses for it.
    pub(crate) fn rounded_up(mut self, granule: Alignment) -> Self {
        self.sizes.iter_mut().for_each(|size| *size = size.next_multiple_of(granule.get()));
        self
    }

    fn slab(stride: ByteCount, count: u32, alignment: Alignment) -> Result<Self, PoolError> {
        let region = stride.checked_mul("count", u64::from(count));
        if stride.is_zero() || count == 0 || !stride.is_aligned_to(alignment) || region.is_err() {
            return Err(PoolError::InvalidSlab { stride, count, alignment });
        }
        let rounding = Rounding::Slab { stride: stride.get(), count };
        Ok(Self { rounding, sizes: Box::new([stride.get()]) })
    }

    /// Returns the class that serves `bytes`; `None` for zero and for more than the largest class.
    #[inline]
    pub(crate) fn class_of(&self, bytes: u64) -> Option<usize> {
        match self.rounding {
            Rounding::Geometric { step_bits, smallest, largest, first } => {
                if bytes > largest || bytes == 0 {
                    return None;
                }
                Some(raw_class(bytes.max(smallest), step_bits) - first)
            }
            Rounding::Slab { stride, .. } => (bytes <= stride && bytes != 0).then_some(0),
        }
    }

    /// Returns the length of the blocks of a class.
    #[inline]
    pub(crate) fn size(&self, class: usize) -> u64 {
        self.sizes[class]
    }

    /// Returns the largest class whose blocks are at most `waste` percent larger than `requested`,
    /// or `class` if there is none.
    pub(crate) fn last_within(&self, class: usize, requested: ByteCount, waste: u8) -> usize {
        let wasted = requested.get().saturating_mul(u64::from(waste)) / 100;
        let most = requested.get().saturating_add(wasted);
        let last = self.sizes.len().saturating_sub(1);
        let mut within = self.class_of(most).unwrap_or(last);
        // Sizes are rounded up to the granule. So neighbouring classes may have one size, and the
        // last one may exceed `most` although no class serves `most`.
        while within > class && self.size(within) > most {
            within -= 1;
        }
        within.max(class)
    }

    /// Returns the number of classes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.sizes.len()
    }

    /// Returns the number of blocks in one region of the upstream.
    #[inline]
    pub(crate) fn blocks_per_slab(&self) -> Option<u32> {
        match self.rounding {
            Rounding::Geometric { .. } => None,
            Rounding::Slab { count, .. } => Some(count),
        }
    }
}

/// Returns the raw number of the class of `bytes`, which must exceed 2^`step_bits`. It counts all
/// classes of 2^`step_bits` steps per doubling: the exponent, then the step within the doubling.
///
/// The lengths of one class share the exponent and the leading bits of `bytes - 1`.
#[inline]
fn raw_class(bytes: u64, step_bits: u32) -> usize {
    let below = bytes - 1;
    let exponent = below.ilog2();
    let step = (below >> (exponent - step_bits)) ^ (1 << step_bits);
    to_usize((u64::from(exponent) << step_bits) | step)
}

/// Returns the largest length of a class: the inverse of [`raw_class`].
fn raw_size(raw: usize, step_bits: u32) -> u64 {
    let raw = to_u64(raw);
    let (exponent, step) = (raw >> step_bits, raw & ((1 << step_bits) - 1));
    let unit = 1 << (exponent - u64::from(step_bits));
    ((1 << step_bits) + step + 1) * unit
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table(classes: SizeClasses) -> ClassTable {
        ClassTable::new(classes, ByteCount::new(256), ByteCount::gib(16), Alignment::SECTOR)
            .unwrap()
    }

    #[test]
    fn powers_of_two() {
        let table = table(SizeClasses::PowerOfTwo);
        for (bytes, size) in [(1, 256), (256, 256), (257, 512), (1 << 20, 1 << 20), (1025, 2048)] {
            assert_eq!(table.size(table.class_of(bytes).unwrap()), size, "{bytes}");
        }
        assert_eq!(table.class_of(0), None);
        assert_eq!(table.class_of((16 << 30) + 1), None);
        assert_eq!(table.len(), 27);
    }

    #[test]
    fn steps_divide_a_doubling_evenly() {
        let table = table(SizeClasses::Steps4);
        let sizes: Vec<_> = (0..6).map(|class| table.size(class)).collect();
        assert_eq!(sizes, [256, 320, 384, 448, 512, 640]);
    }

    #[test]
    fn the_smallest_class_has_room_for_its_steps() {
        for classes in [SizeClasses::PowerOfTwo, SizeClasses::Steps4, SizeClasses::Steps8] {
            let new = |least| {
                let (least, most) = (ByteCount::new(least), ByteCount::kib(1));
                ClassTable::new(classes, least, most, Alignment::BYTE)
            };
            assert!(matches!(new(8), Err(PoolError::InvalidClassRange { .. })));
            let table = new(16).unwrap();
            assert_eq!(table.size(table.class_of(1).unwrap()), 16);
            assert_eq!(table.size(table.len() - 1), 1024);
        }
    }

    #[test]
    fn the_last_class_within_a_waste_wastes_no_more() {
        let table = table(SizeClasses::Steps8);
        let requested = ByteCount::kib(4);
        let class = table.class_of(requested.get()).unwrap();
        assert_eq!(table.size(table.last_within(class, requested, 25)), 5 << 10);
        assert_eq!(table.last_within(class, requested, 0), class);
        let least = table.class_of(1).unwrap();
        assert_eq!(table.last_within(least, ByteCount::new(1), 25), least);
    }

    #[test]
    fn the_last_class_within_a_waste_wastes_no_more_if_sizes_are_rounded_up() {
        // 7.9 KiB: the classes of 9 and 10 KiB are both 12 KiB long.
        let table = table(SizeClasses::Steps8).rounded_up(Alignment::PAGE);
        let class = table.class_of(8090).unwrap();
        let within = table.last_within(class, ByteCount::new(8090), 25);
        assert_eq!(table.size(within), 8 << 10);
        // The last class is 6 MiB long, but serves only 4.5 MiB.
        let (least, largest) = (ByteCount::mib(2), ByteCount::kib(4608));
        let granule = Alignment::new(2 << 20).unwrap();
        let table = ClassTable::new(SizeClasses::Steps8, least, largest, granule).unwrap();
        let (table, requested) = (table.rounded_up(granule), ByteCount::mib(4));
        assert_eq!(table.size(table.len() - 1), 6 << 20);
        let class = table.class_of(requested.get()).unwrap();
        assert_eq!(table.size(table.last_within(class, requested, 25)), 4 << 20);
    }

    #[test]
    fn a_slab_serves_up_to_its_stride() {
        let slab = SizeClasses::ExactSlab { stride: ByteCount::kib(36), count: 10 };
        let table = table(slab);
        assert_eq!(table.class_of(36 << 10), Some(0));
        assert_eq!(table.class_of((36 << 10) + 1), None);
        let odd = SizeClasses::ExactSlab { stride: ByteCount::new(1000), count: 10 };
        let error = ClassTable::new(odd, ByteCount::new(256), ByteCount::gib(1), Alignment::SECTOR);
        assert!(matches!(error, Err(PoolError::InvalidSlab { .. })));
    }

    /// Half of the sizes are small, because only there classes share a granule.
    fn sizes() -> impl Strategy<Value = u64> {
        prop_oneof![1_u64..=64 << 10, 1_u64..=16 << 30]
    }

    proptest! {
        #[test]
        fn the_class_fits_and_no_smaller_one_does(bytes in sizes()) {
            for (classes, steps) in
                [(SizeClasses::PowerOfTwo, 1), (SizeClasses::Steps4, 4), (SizeClasses::Steps8, 8)]
            {
                let rounded = table(classes).rounded_up(Alignment::PAGE);
                let table = table(classes);
                let class = table.class_of(bytes).unwrap();
                prop_assert!(table.size(class) >= bytes);
                prop_assert!(class == 0 || table.size(class - 1) < bytes);
                for (table, waste) in [0, 12, 25, 100].iter().flat_map(|w| [(&table, w), (&rounded, w)]) {
                    // The last class that wastes no more, found one by one.
                    let fits = |&other: &usize| (table.size(other) - bytes) * 100 <= bytes * waste;
                    let last = (class..table.len()).take_while(fits).last().unwrap_or(class);
                    let within = u8::try_from(*waste).unwrap();
                    let found = table.last_within(class, ByteCount::new(bytes), within);
                    // Neighbouring classes may have one size.
                    prop_assert_eq!(table.size(found), table.size(last));
                }
                // The waste is as documented.
                prop_assert!(bytes <= 256 || (table.size(class) - bytes) * steps < bytes);
            }
        }
    }
}
