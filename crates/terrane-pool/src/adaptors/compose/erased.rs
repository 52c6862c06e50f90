//! Erases the memory type of an upstream.

use std::sync::Arc;

use terrane_core::{Allocate, AllocateError, Region, RegionRequest, delegate_allocate};

/// An upstream whose memory is a type-erased [`Region`]. Upstreams of different types can then
/// share one place, such as the bins of a [`Binning`](crate::adaptors::Binning).
#[derive(Clone, Debug)]
pub struct Erased<A>(pub A);

/// Any upstream, shared.
pub type AnyUpstream = Arc<dyn Allocate<Memory = Region> + Send + Sync>;

impl<A: Allocate + Send + Sync + 'static> Erased<A> {
    /// Erases the type of the upstream too.
    #[must_use]
    pub fn shared(upstream: A) -> AnyUpstream {
        Arc::new(Self(upstream))
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Erased<A> {
    type Memory = Region;

    delegate_allocate!(self, self.0);

    fn allocate(&self, request: &RegionRequest) -> Result<Region, AllocateError> {
        self.0.allocate(request).map(Region::new)
    }
}
