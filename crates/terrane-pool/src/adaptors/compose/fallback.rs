//! Sends requests that the first upstream cannot serve to a second.

use terrane_core::{Allocate, AllocateError, Limits, RegionRequest, StorageKind};

use super::either::{Either, MixedKinds, limits_of_either};

/// Two upstreams of one kind. The second serves requests that the first cannot.
///
/// A request goes to the second if the first is exhausted, over its budget, or can never serve its
/// size or alignment. Other errors of the first upstream, such as a closed one, go to the caller.
/// The memory records which upstream served it.
#[derive(Debug)]
pub struct Fallback<A, B> {
    first: A,
    second: B,
}

impl<A: Allocate, B: Allocate> Fallback<A, B> {
    /// Creates a fallback from `first` to `second`.
    ///
    /// # Errors
    ///
    /// [`MixedKinds`] if the two are not of one kind of memory.
    pub fn new(first: A, second: B) -> Result<Self, MixedKinds> {
        MixedKinds::check(&first, &second)?;
        Ok(Self { first, second })
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate, B: Allocate> Allocate for Fallback<A, B> {
    type Memory = Either<A::Memory, B::Memory>;

    fn kind(&self) -> StorageKind {
        self.first.kind()
    }

    fn limits(&self) -> Limits {
        limits_of_either(self.first.limits(), self.second.limits())
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let first = match self.first.allocate(request) {
            Ok(memory) => return Ok(Either::First(memory)),
            Err(error) if falls_back(&error) => error,
            Err(error) => return Err(error),
        };
        tracing::debug!(label = %request.label, bytes = %request.bytes, %first, "falling back");
        match self.second.allocate(request) {
            Ok(memory) => Ok(Either::Second(memory)),
            Err(second) => Err(both_refused(self.kind(), request, first, second)),
        }
    }
}

fn falls_back(error: &AllocateError) -> bool {
    error.is_exhaustion()
        || matches!(
            error,
            AllocateError::TooLarge { .. } | AllocateError::TooStrictlyAligned { .. }
        )
}

/// Returns exhaustion if freeing memory could help with either upstream.
fn both_refused(
    kind: StorageKind,
    request: &RegionRequest,
    first: AllocateError,
    second: AllocateError,
) -> AllocateError {
    let is_exhaustion = first.is_exhaustion() || second.is_exhaustion();
    let both = BothRefused { first, second };
    if !is_exhaustion {
        return AllocateError::backend(kind, request, both);
    }
    let (requested, label) = (request.bytes, request.label.clone());
    let source = Some(Box::new(both) as _);
    AllocateError::OutOfMemory { kind, requested, available: None, label, source }
}

/// The errors of both upstreams of a [`Fallback`].
#[derive(Debug, thiserror::Error)]
#[error("both upstreams refused: {first}; {second}")]
pub struct BothRefused {
    /// The first upstream's error.
    pub first: AllocateError,
    /// The second upstream's error.
    #[source]
    pub second: AllocateError,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;
    use terrane_core::{ByteCount, Memory};
    use terrane_testkit::fault::{FaultPlan, Faulty};
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    fn device(capacity: u64) -> Simulated {
        let capacity = ByteCount::new(capacity);
        Simulated::new(SimulatedOptions { capacity, ..SimulatedOptions::default() })
    }

    #[test]
    fn the_second_serves_what_the_first_cannot() {
        let (first, second) = (device(10), device(20));
        let source = Fallback::new(&first, &second).unwrap();
        let request = RegionRequest::new(ByteCount::new(10));
        let held = [(); 3].map(|()| source.allocate(&request).unwrap());
        assert_eq!(held.each_ref().map(Either::is_second), [false, true, true]);
        let error = source.allocate(&request).unwrap_err();
        assert!(error.is_exhaustion());
        let cause = error.source().unwrap().downcast_ref::<BothRefused>().unwrap();
        assert!(cause.first.is_exhaustion() && cause.second.is_exhaustion());
        drop(held);
        assert_eq!((first.usage().live_blocks, second.usage().live_blocks), (0, 0));
    }

    #[test]
    fn a_first_upstream_that_fails_is_not_papered_over() {
        let broken = Faulty::new(device(10), FaultPlan::new().fail_call(0).as_backend_failure());
        let source = Fallback::new(broken, device(10)).unwrap();
        let request = RegionRequest::new(ByteCount::new(1));
        let error = source.allocate(&request).unwrap_err();
        assert!(matches!(error, AllocateError::Backend { .. }), "{error}");
        assert_eq!(source.allocate(&request).unwrap().length(), ByteCount::new(1));
    }

    #[test]
    fn kinds_do_not_mix() {
        let other = Simulated::new(SimulatedOptions { device: 1, ..SimulatedOptions::default() });
        let mixed = Fallback::new(device(1), &other).unwrap_err();
        assert_eq!(mixed.second, other.kind());
    }
}
