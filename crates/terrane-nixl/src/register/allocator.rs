//! Allocators that register memory when they allocate it.

use terrane_core::{
    Allocate, AllocateError, Limits, Memory, RegionRequest, Register, Registered, StorageKind,
};

/// An allocator that registers memory when it allocates it. Use it for bounce slots, staging memory
/// and pools for transfers with peers.
///
/// Memory that cannot be registered is freed, and the request fails. An empty request registers
/// nothing.
///
/// ```no_run
/// use std::sync::Arc;
/// use terrane_nixl::{Agent, NixlEngine, NixlEngineOptions, RegisteredAllocator};
/// use terrane_transfer::CopyEngine;
/// use terrane_transfer::engines::{RelayEngine, RelayOptions};
/// # fn example(
/// #     agent: &Agent,
/// #     device: Arc<dyn CopyEngine>,
/// #     pinned: impl terrane_core::Allocate + Send + Sync + 'static,
/// # ) -> Result<(), Box<dyn std::error::Error>> {
/// // Device memory that no backend accepts reaches a peer through pinned memory for UCX.
/// let nixl = Arc::new(NixlEngine::new(agent, NixlEngineOptions::default())?);
/// let bounce = RegisteredAllocator::new(pinned, agent.clone());
/// let relay = RelayEngine::new(device, nixl, bounce, &RelayOptions::default())?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RegisteredAllocator<A, R> {
    allocator: A,
    registrar: R,
}

impl<A: Allocate, R: Register> RegisteredAllocator<A, R> {
    /// Creates an allocator that registers memory from `allocator` with `registrar`.
    pub fn new(allocator: A, registrar: R) -> Self {
        Self { allocator, registrar }
    }
}

// SAFETY: the memory is the inner allocator's, owned only together with its registration.
unsafe impl<A: Allocate, R: Register> Allocate for RegisteredAllocator<A, R> {
    type Memory = Box<dyn Memory>;

    fn kind(&self) -> StorageKind {
        self.allocator.kind()
    }

    fn limits(&self) -> Limits {
        self.allocator.limits().and(self.registrar.limits())
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let memory = self.allocator.allocate(request)?;
        if request.bytes.is_zero() {
            return Ok(Box::new(memory));
        }
        match Registered::new(&self.registrar, memory) {
            Ok(registered) => Ok(Box::new(registered)),
            Err(failed) => Err(AllocateError::backend(self.kind(), request, failed.cause)),
        }
    }
}
