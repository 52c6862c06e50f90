//! Hides an upstream's type of memory.

use std::sync::Arc;

use terrane_core::{Allocate, AllocateError, Limits, Region, RegionRequest, StorageKind};

/// An upstream whose memory is a type-erased [`Region`], so that upstreams of different types can
/// stand in one place, such as the bins of a [`Binning`](super::Binning).
#[derive(Clone, Debug)]
pub struct Erased<A>(pub A);

/// Any upstream at all, shared.
pub type AnyUpstream = Arc<dyn Allocate<Memory = Region> + Send + Sync>;

impl<A: Allocate + Send + Sync + 'static> Erased<A> {
    /// The upstream with its own type hidden too.
    #[must_use]
    pub fn shared(upstream: A) -> AnyUpstream {
        Arc::new(Self(upstream))
    }
}

// SAFETY: the memory is the upstream's, which hands it to nobody else.
unsafe impl<A: Allocate> Allocate for Erased<A> {
    type Memory = Region;

    fn kind(&self) -> StorageKind {
        self.0.kind()
    }

    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Region, AllocateError> {
        self.0.allocate(request).map(Region::new)
    }
}
