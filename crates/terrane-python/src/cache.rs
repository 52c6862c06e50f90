//! KV caches: adopted tensors of other libraries, and caches that this package allocates.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use terrane_core::{Allocate, DeviceId, StorageKind};
use terrane_cuda::{Context, PinnedAllocator, PinnedOptions};
use terrane_interop::dlpack::{ImportedTensor, TensorShape};
use terrane_interop::tensors::{KvAxis, KvAxisOrder, KvTensors, adopt_kv};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, PhysicalLayout, TokenOrder};
use terrane_storage::{SystemAllocator, SystemOptions};
use terrane_store::Blocks as NativeBlocks;
use terrane_transfer::{Access, DeviceOrder, Endpoint};

use crate::device::{self, DeviceSide};
use crate::errors::{StoreError, text};
use crate::memory::{Blocks, KeptObjects, drop_detached, release_ended};
use crate::numbers::ids;
use crate::pages::{self, PagePart};
use crate::tensors::{self, MemoryName, Origin};
use crate::views::{self, KvTensor};

/// The names of the axes in Python.
const AXES: [(&str, KvAxis); 8] = [
    ("outer", KvAxis::Outer),
    ("block", KvAxis::Block),
    ("token", KvAxis::Token),
    ("slot", KvAxis::Slot),
    ("head", KvAxis::Head),
    ("dim", KvAxis::Dim),
    ("row", KvAxis::Row),
    ("one", KvAxis::One),
];

/// The blocks of a KV cache in tensors of another library, in host memory or on a CUDA device.
///
/// The tensors are adopted without a copy, with their strides. They stay alive with this object, and while a job uses
/// it. While a job runs, no other code may write the blocks of a `put`, or access the blocks of a `get`.
///
/// - `tensors`: one for each layer, with the same shape; any object with `__dlpack__` (PyTorch, NumPy, JAX, …). With
///   `apart`, K and V of each layer are separate tensors: K0, V0, K1, V1, …
/// - `axes`: the meaning of each dimension: "outer" (K and V), "block", "token" (of a block), "slot" (tokens of all blocks),
///   "head", "dim", "row" (all heads of a token), "one". vLLM: "block head token dim", where "dim" is K and then V of a
///   token. Older releases of vLLM: "outer block token head dim". SGLang: "slot head dim" with `apart`.
/// - `page_size`: the tokens of a block; needed with "slot".
///
/// Pass it to a store as a group: `Store(…, groups=[("kv", cache)])`.
///
/// A job on blocks of a device runs after the work that is already on the library's current stream of that device.
/// Pass `stream=` to name another stream. When a job has ended, its bytes are visible to every stream.
///
/// The pages of host tensors may be pinned for direct I/O, so do not discard them (`mmap.madvise`) while the cache exists.
///
/// Raises `StoreError` if the tensors do not match, with the tensor and the axis.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct KvCache {
    endpoint: ManuallyDrop<Endpoint>,
    /// The dimensions of a KV cache. `None` for pages of unknown content.
    config: Option<LayoutConfig>,
    device: Option<DeviceSide>,
}

impl KvCache {
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The context of the cache's device.
    pub(crate) fn context(&self) -> Option<&Context> {
        self.device.as_ref().map(DeviceSide::context)
    }

    /// The work after which a job on its blocks runs. `None` on the host, where a stream is refused.
    pub(crate) fn order(
        &self,
        py: Python<'_>,
        stream: Option<i64>,
    ) -> PyResult<Option<DeviceOrder>> {
        match (&self.device, stream) {
            (Some(device), stream) => device.order(py, stream).map(Some),
            (None, None) => Ok(None),
            (None, Some(_)) => Err(PyValueError::new_err(
                "stream= was passed for blocks in host memory, which no stream orders; omit it",
            )),
        }
    }

    /// The work after which a copy between two caches runs. Without a stream, this is the work of both libraries.
    pub(crate) fn order_of_both(
        py: Python<'_>,
        source: &Self,
        destination: &Self,
        stream: Option<i64>,
    ) -> PyResult<Option<DeviceOrder>> {
        match (&source.device, &destination.device, stream) {
            (Some(source), Some(destination), None) => source.order_with(py, destination).map(Some),
            (Some(_), ..) => source.order(py, stream),
            (None, ..) => destination.order(py, stream),
        }
    }

    fn of(endpoint: Endpoint, config: Option<LayoutConfig>, device: Option<DeviceSide>) -> Self {
        Self { endpoint: ManuallyDrop::new(endpoint), config, device }
    }

    fn adopt(
        py: Python<'_>,
        imported: &[ImportedTensor],
        axes: &str,
        page_size: Option<u32>,
        apart: bool,
        tensor: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let axes = axes.split_whitespace().map(axis).collect::<PyResult<Vec<_>>>()?;
        let config = config(imported, &axes, page_size, apart)?;
        let order = KvAxisOrder::new(&axes).map_err(refused)?;
        let builder = if apart {
            let keys: Vec<_> = imported.iter().step_by(2).cloned().collect();
            let values: Vec<_> = imported.iter().skip(1).step_by(2).cloned().collect();
            adopt_kv(&config, &order, KvTensors::Apart { keys: &keys, values: &values })
        } else {
            adopt_kv(&config, &order, KvTensors::Together(imported))
        };
        let layout = builder.map_err(refused)?.unregistered().build().map_err(refused)?;
        let endpoint = Endpoint::new(layout).map_err(refused)?;
        Self::adopted(py, endpoint, Some(config), tensor)
    }

    fn adopted(
        py: Python<'_>,
        endpoint: Endpoint,
        config: Option<LayoutConfig>,
        tensor: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let device = match endpoint.kind() {
            StorageKind::Device(id) => {
                let context = py.detach(|| device::context(id))?;
                Some(DeviceSide::new(&context, tensor))
            }
            _ => None,
        };
        Ok(Self::of(endpoint, config, device))
    }

    fn allocated(config: LayoutConfig, allocator: &impl Allocate) -> PyResult<Self> {
        let layout = LayoutBuilder::new(config).fully_contiguous().allocate(allocator);
        let layout = layout.unregistered().build().map_err(refused)?;
        Ok(Self::of(Endpoint::new(layout).map_err(refused)?, Some(config), None))
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        // SAFETY: the field is not used afterwards.
        let endpoint = unsafe { ManuallyDrop::take(&mut self.endpoint) };
        // Freeing pinned memory waits for the device. The drop also releases the `keep` object of `at`.
        drop_detached(endpoint);
    }
}

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (tensors, axes, *, page_size = None, apart = false))]
    fn new(
        py: Python<'_>,
        tensors: Vec<Bound<'_, PyAny>>,
        axes: &str,
        page_size: Option<u32>,
        apart: bool,
    ) -> PyResult<Self> {
        let imported: Vec<_> = tensors.iter().map(tensors::import).collect::<PyResult<_>>()?;
        let first = tensors.first().map(|tensor| tensor.clone().unbind());
        Self::adopt(py, &imported, axes, page_size, apart, first)
    }

    /// Adopts tensors by their addresses (`tensor.data_ptr()`): one for each layer, each with the shape `sizes`, and
    /// with `strides` in elements (compact if None).
    ///
    /// `memory` is "host", "pinned", or the number of a CUDA device. `keep` is referenced until the cache and its
    /// jobs have ended. Jobs on a device must pass `stream`.
    ///
    /// The memory must be valid: a wrong host address crashes the process, as with `ctypes`. The driver checks
    /// addresses of a device.
    #[staticmethod]
    #[pyo3(signature = (
        pointers, axes, sizes, *, element_bytes, keep, strides = None, memory = MemoryName::Host(String::from("host")),
        page_size = None, apart = false
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn at(
        py: Python<'_>,
        pointers: &Bound<'_, PyAny>,
        axes: &str,
        sizes: Vec<u64>,
        element_bytes: u8,
        keep: Py<PyAny>,
        strides: Option<Vec<u64>>,
        memory: MemoryName,
        page_size: Option<u32>,
        apart: bool,
    ) -> PyResult<Self> {
        let shape: TensorShape = tensors::shape(element_bytes, &sizes, strides.as_deref())?;
        let adopt = || {
            let origin = Origin::new(py, &memory, Arc::new(KeptObjects::object(keep)))?;
            // SAFETY: Python's caller promises that the memory is valid while `keep` lives.
            let imported = unsafe { origin.tensors(pointers, &shape) }?;
            Self::adopt(py, &imported, axes, page_size, apart, None)
        };
        // After an error, nothing else references `keep`.
        adopt().inspect_err(|_| release_ended(py))
    }

    /// Adopts pages of bytes whose content is unknown, by their addresses. Returns a cache for each group of layers.
    ///
    /// The groups have the same block ids, and may share tensors. A group is a list of parts `(pointers, page_bytes,
    /// sizes, strides)`: tensors of equal shape, one for each layer. `sizes` is `[blocks]`, or `[chunks, blocks]` with
    /// several blocks in each chunk, and `strides` are bytes. The block `b` of chunk `c` has the id `c * blocks + b`. A
    /// block has a page of `page_bytes` bytes in each tensor of each part. The manager copies between groups with equal
    /// parts.
    ///
    /// `memory` and `keep` are as for `at`, and so are the requirements on the memory.
    ///
    /// Raises `StoreError` for pages that overlap, for parts with different numbers of tensors or blocks, and for tensors
    /// that interleave at unequal distances.
    #[staticmethod]
    #[pyo3(signature = (groups, *, keep, memory = MemoryName::Host(String::from("host"))))]
    fn pages(
        py: Python<'_>,
        groups: Vec<Vec<PagePart<'_>>>,
        keep: Py<PyAny>,
        memory: MemoryName,
    ) -> PyResult<Vec<Self>> {
        let adopt = || {
            let origin = Origin::new(py, &memory, Arc::new(KeptObjects::object(keep)))?;
            // SAFETY: Python's caller promises that the memory is valid while `keep` lives.
            let layouts = groups.iter().map(|parts| unsafe { pages::layout(&origin, parts) });
            let layouts: Vec<PhysicalLayout> = layouts.collect::<PyResult<_>>()?;
            let endpoints = Endpoint::of_groups(layouts).map_err(|error| refused(error.reason))?;
            let adopted = |endpoint| Self::adopted(py, endpoint, None, None);
            endpoints.into_iter().map(adopted).collect::<PyResult<Vec<Self>>>()
        };
        // After an error, nothing else references `keep`.
        adopt().inspect_err(|_| release_ended(py))
    }

    /// Allocates a cache of the same shape with this number of blocks, in "system" or "pinned" memory.
    ///
    /// Pinned memory is registered with the cache's device, or with `device`.
    ///
    /// Raises `StoreError` if there is not enough memory, or no CUDA driver for pinned memory.
    #[pyo3(signature = (blocks, memory = "system", *, device = None))]
    fn allocate_like(
        &self,
        py: Python<'_>,
        blocks: u32,
        memory: &str,
        device: Option<u32>,
    ) -> PyResult<Self> {
        let config = self.config.as_ref().ok_or_else(|| {
            PyValueError::new_err(
                "this cache has pages of unknown content, and no axes to allocate; adopt your own memory with KvCache.pages",
            )
        })?;
        let config = config.with_num_blocks(blocks).map_err(refused)?;
        match memory {
            "system" => py.detach(|| {
                Self::allocated(config, &SystemAllocator::new(SystemOptions::default()))
            }),
            "pinned" => {
                let device = device.or(self.device_number()).unwrap_or(0);
                py.detach(|| Self::allocated(config, &pinned(device)?))
            }
            _ => Err(PyValueError::new_err(format!(
                "there is no memory {memory:?}; pass \"system\" or \"pinned\""
            ))),
        }
    }

    /// The blocks as tensors for other libraries, without a copy: one for each layer, or K and V of each layer if
    /// `axes` has no "outer". `dtype` is a name such as "bfloat16" or "uint16". The cache must be in host memory.
    ///
    /// Raises `StoreError` if strides cannot express the axes, or if jobs use the blocks.
    #[pyo3(signature = (axes, dtype, *, writable = false))]
    fn tensors(&self, axes: &str, dtype: &str, writable: bool) -> PyResult<Vec<KvTensor>> {
        let axes = axes.split_whitespace().map(axis).collect::<PyResult<Vec<_>>>()?;
        let order = KvAxisOrder::new(&axes).map_err(refused)?;
        let access = if writable { Access::Write } else { Access::Read };
        views::tensors(&self.endpoint, &order, dtype, access)
    }

    /// Selects blocks by their ids (a list or an array of integers), whole, or the first `tokens` of each.
    ///
    /// Raises `ValueError` for an id that is not below 2³².
    #[pyo3(signature = (numbers, *, tokens = None))]
    fn blocks(
        slf: &Bound<'_, Self>,
        numbers: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Blocks> {
        let numbers = short(numbers)?;
        let mut blocks = NativeBlocks::new(&slf.get().endpoint, &numbers);
        if let Some(tokens) = tokens {
            blocks = blocks.tokens(&short(tokens)?);
        }
        let whole = tokens.is_none().then_some(numbers);
        Ok(Blocks::of_cache(blocks, whole, slf.clone().unbind()))
    }

    /// Records that other code writes these blocks whole before a job reads them. Without it, a job refuses to read a
    /// block that a failed job may have written in part.
    ///
    /// Raises `StoreError` if a job uses them.
    fn mark_written(&self, numbers: &Bound<'_, PyAny>) -> PyResult<()> {
        // When a hold for writing ends, its blocks count as written.
        self.endpoint.hold_for_write(&short(numbers)?).map(drop).map_err(refused)
    }

    /// The number of blocks.
    fn __len__(&self) -> usize {
        usize::try_from(self.endpoint.layout().geometry().num_blocks()).unwrap_or(0)
    }

    /// The bytes of a block in all layers.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.endpoint.layout().geometry().block_bytes().get()
    }

    /// The number of the CUDA device with the blocks; None in host memory.
    #[getter(device)]
    fn device_number(&self) -> Option<u32> {
        self.context().map(|context| context.device().id.get())
    }
}

/// The allocator of pinned memory of a device.
pub(crate) fn pinned(device: u32) -> PyResult<PinnedAllocator> {
    let context = device::context(DeviceId::new(device))?;
    PinnedAllocator::new(&context, PinnedOptions::default()).map_err(device::refused)
}

fn refused(error: impl std::error::Error) -> PyErr {
    StoreError::new_err(text(&error))
}

fn short(numbers: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let id = |number: usize| {
        u32::try_from(number)
            .map_err(|_| PyValueError::new_err(format!("{number} is not a block id")))
    };
    ids(numbers)?.into_iter().map(id).collect()
}

fn axis(name: &str) -> PyResult<KvAxis> {
    let entry = AXES.iter().find(|(known, _)| *known == name);
    entry.map(|(_, axis)| *axis).ok_or_else(|| {
        let known = AXES.map(|(known, _)| known).join(", ");
        PyValueError::new_err(format!("there is no axis {name:?}; the axes are {known}"))
    })
}

/// The dimensions of the cache, from the first tensor. The adoption compares them with all tensors.
fn config(
    tensors: &[ImportedTensor],
    axes: &[KvAxis],
    page_size: Option<u32>,
    apart: bool,
) -> PyResult<LayoutConfig> {
    let first = tensors.first().ok_or_else(|| PyValueError::new_err("a cache needs a tensor"))?;
    let sizes = first.shape().sizes();
    if sizes.len() != axes.len() {
        return Err(PyValueError::new_err(format!(
            "the tensors have {} dimensions and {} axes are named",
            sizes.len(),
            axes.len()
        )));
    }
    let size = |target: KvAxis| {
        let at = axes.iter().position(|axis| *axis == target)?;
        u32::try_from(*sizes.get(at)?).ok()
    };
    let page = size(KvAxis::Token).or(page_size);
    let page = page.filter(|page| *page > 0);
    let page =
        page.ok_or_else(|| PyValueError::new_err("pass page_size, the tokens of a block"))?;
    let blocks = size(KvAxis::Block).or_else(|| Some(size(KvAxis::Slot)? / page)).unwrap_or(0);
    let heads = size(KvAxis::Head).unwrap_or(1);
    let inner = size(KvAxis::Row).or_else(|| size(KvAxis::Dim)?.checked_mul(heads)).unwrap_or(0);
    let width = first.shape().element().width().and_then(|width| u8::try_from(width.get()).ok());
    let width = width.ok_or_else(|| PyTypeError::new_err("the elements are not whole bytes"))?;
    let layers = if apart { tensors.len() / 2 } else { tensors.len() };
    LayoutConfig::builder()
        .num_blocks(blocks)
        .num_layers(u32::try_from(layers).unwrap_or(u32::MAX))
        .outer_dim(if apart { 2 } else { size(KvAxis::Outer).unwrap_or(1) })
        .page_size(page)
        .inner_dim(inner)
        .num_heads(heads)
        .token_order(TokenOrder::TokenMajor)
        .element(ElementFormat::Width(width))
        .build()
        .map_err(refused)
}
