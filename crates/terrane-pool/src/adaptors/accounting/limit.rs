//! Limits an upstream to a budget.

use terrane_core::{Allocate, AllocateError, Memory, RegionRequest, delegate_allocate};

use super::budget::{Budget, OverBudget, Reservation};
use crate::adaptors::attached::Attached;

/// An upstream within a [`Budget`].
///
/// The bytes, rounded up to the upstream's granule, are reserved before the request to the
/// upstream. If the upstream returns more, the rest is reserved too, or the memory is freed. So the
/// budget counts the bytes obtained. The bytes are released after the memory has been freed.
#[derive(Debug)]
pub struct Limit<A> {
    upstream: A,
    budget: Budget,
}

/// Memory from [`Limit`].
pub type Limited<M> = Attached<M, (), Reservation>;

impl<A: Allocate> Limit<A> {
    /// Limits `upstream` to `budget`.
    #[must_use]
    pub fn new(upstream: A, budget: Budget) -> Self {
        Self { upstream, budget }
    }

    /// The upstream.
    #[must_use]
    pub fn upstream(&self) -> &A {
        &self.upstream
    }

    /// The budget.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Limit<A> {
    type Memory = Limited<A::Memory>;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let refused = |error: OverBudget| error.for_label(request.label.clone());
        let expected = request
            .bytes
            .align_up(self.upstream.limits().granule)
            .map_err(|overflow| AllocateError::backend(self.kind(), request, overflow))?;
        let mut reservation = self.budget.reserve(expected).map_err(refused)?;
        let memory = self.upstream.allocate(request)?;
        reservation.resize(memory.length()).map_err(refused)?;
        Ok(Attached::after(memory, reservation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::{Alignment, ByteCount, Limits};
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn the_budget_counts_what_was_obtained() {
        let limits = Limits { granule: Alignment::PAGE, ..Limits::NONE };
        let upstream = Simulated::new(SimulatedOptions { limits, ..SimulatedOptions::default() });
        let budget = Budget::new("pages", ByteCount::kib(8));
        let limited = Limit::new(&upstream, budget.clone());

        let page = limited.allocate(&RegionRequest::new(ByteCount::new(1))).unwrap();
        assert_eq!((budget.live(), page.length()), (ByteCount::kib(4), ByteCount::kib(4)));
        let request = RegionRequest::new(ByteCount::new(4097)).labelled("weights");
        let error = limited.allocate(&request).unwrap_err();
        let AllocateError::OverBudget { budget: name, label, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((name.as_str(), label.as_str()), ("pages", "weights"));
        assert!(error.to_string().contains("budget pages of"), "{error}");
        assert!(error.is_exhaustion());
        assert_eq!(
            upstream.usage().allocations,
            1,
            "the refused request did not reach the upstream"
        );
        drop(page);
        assert_eq!(budget.live(), ByteCount::ZERO);
    }

    #[test]
    fn a_refusal_by_the_upstream_releases_the_reservation() {
        let options = SimulatedOptions { capacity: ByteCount::ZERO, ..SimulatedOptions::default() };
        let budget = Budget::new("all", ByteCount::kib(8));
        let limited = Limit::new(Simulated::new(options), budget.clone());
        assert!(limited.allocate(&RegionRequest::new(ByteCount::new(1))).is_err());
        assert_eq!(budget.live(), ByteCount::ZERO);
    }
}
