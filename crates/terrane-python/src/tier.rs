//! Memory tiers above the disk of a store.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use terrane_core::{ByteCount, DeviceId};
use terrane_cuda::Context;
use terrane_store::MemoryTier;

use crate::cache::{self, KvCache};
use crate::device;

/// A tier of memory above the disk of a store: `Store(…, tiers=[Tier.pinned(8 << 30)])`.
///
/// It keeps blocks that are used often, and blocks of a device pass through it. The fastest tier comes first.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Tier {
    name: String,
    memory: TierMemory,
}

enum TierMemory {
    System(ByteCount),
    Pinned(ByteCount, u32),
    Caches(Vec<Py<KvCache>>),
}

#[pymethods]
impl Tier {
    /// A tier with this many bytes of system memory, which the groups share by weight.
    #[staticmethod]
    #[pyo3(signature = (capacity, *, name = String::from("host")))]
    fn system(capacity: u64, name: String) -> Self {
        Self { name, memory: TierMemory::System(ByteCount::new(capacity)) }
    }

    /// A tier with this many bytes of memory that is pinned for a CUDA device. The groups share it by weight.
    #[staticmethod]
    #[pyo3(signature = (capacity, *, device = 0, name = String::from("pinned")))]
    fn pinned(capacity: u64, device: u32, name: String) -> Self {
        Self { name, memory: TierMemory::Pinned(ByteCount::new(capacity), device) }
    }

    /// A tier with the blocks of these caches, one for each group of the store. The store owns these blocks until it
    /// is closed.
    #[staticmethod]
    fn of(caches: Vec<Py<KvCache>>, name: String) -> PyResult<Self> {
        if caches.is_empty() {
            return Err(PyValueError::new_err("a tier needs a cache for each group of the store"));
        }
        Ok(Self { name, memory: TierMemory::Caches(caches) })
    }

    /// Its name in `Store.snapshot()`.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    fn __repr__(&self) -> String {
        let name = &self.name;
        match &self.memory {
            TierMemory::System(bytes) => format!("Tier.system({}, name={name:?})", bytes.get()),
            TierMemory::Pinned(bytes, device) => {
                format!("Tier.pinned({}, device={device}, name={name:?})", bytes.get())
            }
            TierMemory::Caches(caches) => format!("Tier.of({} caches, {name:?})", caches.len()),
        }
    }
}

impl Tier {
    /// Creates the tier of a store.
    pub(crate) fn native(&self) -> PyResult<MemoryTier> {
        Ok(match &self.memory {
            TierMemory::System(bytes) => MemoryTier::system(&self.name, *bytes),
            TierMemory::Pinned(bytes, device) => {
                MemoryTier::allocated(&self.name, *bytes, cache::pinned(*device)?)
            }
            TierMemory::Caches(caches) => {
                let endpoints = caches.iter().map(|cache| cache.get().endpoint().clone());
                MemoryTier::new(&self.name, endpoints)
            }
        })
    }

    /// The devices of copies to and from the tier.
    pub(crate) fn contexts(&self) -> PyResult<Vec<Context>> {
        match &self.memory {
            TierMemory::System(_) => Ok(Vec::new()),
            TierMemory::Pinned(_, device) => Ok(vec![device::context(DeviceId::new(*device))?]),
            TierMemory::Caches(caches) => {
                Ok(caches.iter().filter_map(|cache| cache.get().context().cloned()).collect())
            }
        }
    }

    /// The objects that a store keeps alive with the tier.
    pub(crate) fn caches(&self, py: Python<'_>) -> Vec<Py<KvCache>> {
        match &self.memory {
            TierMemory::Caches(caches) => caches.iter().map(|cache| cache.clone_ref(py)).collect(),
            _ => Vec::new(),
        }
    }
}
