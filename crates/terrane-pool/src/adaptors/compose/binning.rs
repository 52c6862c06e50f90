//! Sends each size to its own upstream.

use terrane_core::{Allocate, AllocateError, ByteCount, Limits, RegionRequest, StorageKind};

use super::either::{MixedKinds, limits_of_either};

/// Upstreams of one kind: each serves requests up to a size, and one serves the rest.
///
/// Upstreams of different types share the bins as [`AnyUpstream`](crate::adaptors::AnyUpstream).
#[derive(Debug)]
pub struct Binning<A> {
    /// In ascending order of size.
    bins: Vec<(ByteCount, A)>,
    rest: A,
}

impl<A: Allocate> Binning<A> {
    /// Sends every request to `rest`, until bins are added.
    #[must_use]
    pub fn new(rest: A) -> Self {
        Self { bins: Vec::new(), rest }
    }

    /// Sends requests of at most `largest` bytes to `upstream`, unless a smaller bin accepts them.
    /// A bin of the same size is replaced.
    ///
    /// # Errors
    ///
    /// [`MixedKinds`] if `upstream` is of another kind than the others.
    pub fn with_bin(mut self, largest: ByteCount, upstream: A) -> Result<Self, MixedKinds> {
        MixedKinds::check(&self.rest, &upstream)?;
        match self.bins.binary_search_by_key(&largest, |(size, _)| *size) {
            Ok(index) => {
                if let Some(bin) = self.bins.get_mut(index) {
                    bin.1 = upstream;
                }
            }
            Err(index) => self.bins.insert(index, (largest, upstream)),
        }
        Ok(self)
    }

    /// Returns the upstream that serves requests of `bytes` bytes.
    fn upstream_for(&self, bytes: ByteCount) -> &A {
        let index = self.bins.partition_point(|(largest, _)| *largest < bytes);
        self.bins.get(index).map_or(&self.rest, |(_, upstream)| upstream)
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Binning<A> {
    type Memory = A::Memory;

    fn kind(&self) -> StorageKind {
        self.rest.kind()
    }

    fn limits(&self) -> Limits {
        let bins = self.bins.iter().map(|(_, upstream)| upstream.limits());
        let largest_region = self.rest.limits().largest_region;
        Limits { largest_region, ..bins.fold(self.rest.limits(), limits_of_either) }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        self.upstream_for(request.bytes).allocate(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptors::accounting::budget::Budget;
    use crate::adaptors::accounting::limit::Limit;
    use crate::adaptors::compose::erased::Erased;
    use std::sync::Arc;
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn each_size_goes_to_its_bin() {
        let [small, medium, rest] =
            [(); 3].map(|()| Arc::new(Simulated::new(SimulatedOptions::default())));
        let budget = Budget::new("medium", ByteCount::mib(1));
        let source = Binning::new(Erased::shared(Arc::clone(&rest)))
            .with_bin(
                ByteCount::mib(1),
                Erased::shared(Limit::new(Arc::clone(&medium), budget.clone())),
            )
            .unwrap()
            .with_bin(ByteCount::kib(1), Erased::shared(Arc::clone(&small)))
            .unwrap();
        let held: Vec<_> = [0, 1024, 1025, 1 << 20, (1 << 20) + 1]
            .map(|bytes| source.allocate(&RegionRequest::new(ByteCount::new(bytes))))
            .into_iter()
            .filter_map(Result::ok)
            .collect();
        assert_eq!(held.len(), 4, "the budget refuses one");
        let blocks = [&small, &medium, &rest].map(|device| device.usage().live_blocks);
        assert_eq!(blocks, [1, 1, 1]);
        drop(held);
        assert_eq!(budget.live(), ByteCount::ZERO);
    }
}
