//! Memory from one of two upstreams.

use terrane_core::{Allocate, Limits, Memory, StorageKind};

/// Memory from one of two upstreams, and which one.
#[derive(Debug)]
pub enum Either<A, B> {
    /// From the first.
    First(A),
    /// From the second.
    Second(B),
}

impl<A: Memory, B: Memory> Either<A, B> {
    /// Returns whether the second upstream served it.
    #[must_use]
    pub fn is_second(&self) -> bool {
        matches!(self, Self::Second(_))
    }

    fn inner(&self) -> &dyn Memory {
        match self {
            Self::First(memory) => memory,
            Self::Second(memory) => memory,
        }
    }
}

// SAFETY: every method returns the inner memory's value. The inner memory does not change, lives as
// long as `self`, and does not move its bytes when `self` moves.
unsafe impl<A: Memory, B: Memory> Memory for Either<A, B> {
    terrane_core::delegate_memory!(self, *self.inner());
}

/// The error for upstreams of different kinds where one kind is required.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "upstreams of {first} and {second} memory cannot be combined, because an allocator has one \
     kind; use one allocator for each kind"
)]
pub struct MixedKinds {
    /// The kind of the first upstream.
    pub first: StorageKind,
    /// The other kind.
    pub second: StorageKind,
}

impl MixedKinds {
    pub(super) fn check(first: &impl Allocate, second: &impl Allocate) -> Result<(), Self> {
        let (first, second) = (first.kind(), second.kind());
        if first == second { Ok(()) } else { Err(Self { first, second }) }
    }
}

/// Returns limits within which one upstream or the other serves every request. Each limit is the
/// stricter of the two, except that the largest region is the larger of the two.
pub(super) fn limits_of_either(first: Limits, second: Limits) -> Limits {
    let largest_region = match (first.largest_region, second.largest_region) {
        (Some(a), Some(b)) => Some(a.max(b)),
        _ => None,
    };
    Limits { largest_region, ..first.and(second) }
}
