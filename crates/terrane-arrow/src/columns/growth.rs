//! The growth policy of a columnar buffer.

use std::num::NonZeroU64;

use super::ColumnError;

/// The new capacity of a buffer that is too small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// The current capacity. A request for more is refused.
    #[default]
    Fixed,
    /// The needed capacity.
    Exact,
    /// The current capacity, doubled until it is sufficient.
    Doubling,
    /// The next multiple of this number of rows.
    Steps(NonZeroU64),
}

impl Growth {
    /// The new capacity for `needed` rows of a buffer with this `capacity`. It is never smaller
    /// than the current one.
    ///
    /// # Errors
    ///
    /// [`ColumnError::FixedCapacity`] if the policy forbids growth.
    pub fn capacity(self, capacity: u64, needed: u64) -> Result<u64, ColumnError> {
        if needed <= capacity {
            return Ok(capacity);
        }
        // On overflow, the needed capacity is returned, which no allocator can provide.
        Ok(match self {
            Self::Fixed => return Err(ColumnError::FixedCapacity { capacity, needed }),
            Self::Exact => needed,
            Self::Doubling => {
                let times = needed.div_ceil(capacity.max(1)).checked_next_power_of_two();
                times.and_then(|times| capacity.max(1).checked_mul(times)).unwrap_or(needed)
            }
            Self::Steps(rows) => needed.checked_next_multiple_of(rows.get()).unwrap_or(needed),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_gives_what_is_needed_or_refuses() {
        let steps = Growth::Steps(NonZeroU64::new(1000).unwrap());
        for (growth, needed, expected) in [
            (Growth::Fixed, 96, Some(96)),
            (Growth::Fixed, 97, None),
            (Growth::Exact, 97, Some(97)),
            (Growth::Doubling, 97, Some(192)),
            (Growth::Doubling, 193, Some(384)),
            (Growth::Doubling, u64::MAX, Some(u64::MAX)),
            (steps, 97, Some(1000)),
            (steps, 1001, Some(2000)),
            (steps, u64::MAX, Some(u64::MAX)),
            (steps, 5, Some(96)),
        ] {
            assert_eq!(growth.capacity(96, needed).ok(), expected, "{growth:?} {needed}");
        }
        assert_eq!(Growth::Doubling.capacity(0, 3).unwrap(), 4);
    }
}
