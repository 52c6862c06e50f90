//! Calls back when an upstream is exhausted, so that the caller can free memory.

use std::fmt;
use std::num::NonZeroU32;

use terrane_core::{Allocate, AllocateError, RegionRequest, delegate_allocate};

use crate::pool::reclaim::Retry;

/// An upstream that calls back when it is exhausted, and tries again if the callback requests it.
///
/// Errors other than exhaustion ([`AllocateError::is_exhaustion`]) are returned at once, because
/// freeing memory does not help. The callback runs on the allocating thread, without a lock.
pub struct OnFailure<A, F> {
    upstream: A,
    retries: NonZeroU32,
    callback: F,
}

/// A refused request, the argument of the callback of [`OnFailure`].
#[derive(Debug)]
pub struct RefusedRequest<'r> {
    /// The request.
    pub request: &'r RegionRequest,
    /// The refusal.
    pub error: &'r AllocateError,
    /// The number of earlier calls of the callback for this request.
    pub earlier_calls: u32,
}

impl<A, F> OnFailure<A, F>
where
    A: Allocate,
    F: Fn(&RefusedRequest<'_>) -> Retry,
{
    /// Calls `callback` when `upstream` is exhausted, up to `retries` times a request.
    #[must_use]
    pub fn new(upstream: A, retries: NonZeroU32, callback: F) -> Self {
        Self { upstream, retries, callback }
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A, F> Allocate for OnFailure<A, F>
where
    A: Allocate,
    F: Fn(&RefusedRequest<'_>) -> Retry,
{
    type Memory = A::Memory;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        for earlier_calls in 0..self.retries.get() {
            let error = match self.upstream.allocate(request) {
                Err(error) if error.is_exhaustion() => error,
                other => return other,
            };
            let exhausted = RefusedRequest { request, error: &error, earlier_calls };
            if (self.callback)(&exhausted) == Retry::GiveUp {
                return Err(error);
            }
        }
        self.upstream.allocate(request)
    }
}

impl<A: fmt::Debug, F> fmt::Debug for OnFailure<A, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OnFailure")
            .field("upstream", &self.upstream)
            .field("retries", &self.retries)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use terrane_core::ByteCount;
    use terrane_testkit::fault::{FaultPlan, Faulty};
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    const TWICE: NonZeroU32 = NonZeroU32::new(2).unwrap();

    fn request() -> RegionRequest {
        RegionRequest::new(ByteCount::new(1))
    }

    fn failing(plan: FaultPlan) -> Faulty<Simulated> {
        Faulty::new(Simulated::new(SimulatedOptions::default()), plan)
    }

    #[test]
    fn the_callback_makes_room() {
        let capacity = ByteCount::new(1);
        let device = Simulated::new(SimulatedOptions { capacity, ..SimulatedOptions::default() });
        let cache = Cell::new(Some(device.allocate(&request()).unwrap()));
        let source = OnFailure::new(&device, TWICE, |_| match cache.take() {
            Some(_) => Retry::Again,
            None => Retry::GiveUp,
        });
        let held = source.allocate(&request()).unwrap();
        assert!(source.allocate(&request()).unwrap_err().is_exhaustion());
        drop(held);
    }

    #[test]
    fn retries_are_bounded() {
        let calls = Cell::new(0);
        let source = OnFailure::new(failing(FaultPlan::new().fail_from(0)), TWICE, |exhausted| {
            assert_eq!(exhausted.earlier_calls, calls.get());
            calls.set(calls.get() + 1);
            Retry::Again
        });
        assert!(source.allocate(&request()).is_err());
        assert_eq!(calls.get(), 2);
    }

    #[test]
    fn other_errors_are_not_the_callbacks_business() {
        let plan = FaultPlan::new().fail_call(0).as_backend_failure();
        let source = OnFailure::new(failing(plan), TWICE, |_| panic!("called"));
        assert!(matches!(source.allocate(&request()), Err(AllocateError::Backend { .. })));
    }
}
