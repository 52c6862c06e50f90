//! KV caches of other libraries, adopted by DLPack.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use terrane_interop::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use terrane_interop::dlpack::{ImportedTensor, Importer, Structure};
use terrane_interop::tensors::{KvAxis, KvAxisOrder, KvTensors, adopt_kv};
use terrane_layout::{ElementFormat, LayoutConfig, TokenOrder};
use terrane_store::Blocks as NativeBlocks;
use terrane_transfer::Endpoint;

use crate::errors::{StoreError, text};
use crate::memory::Blocks;
use crate::numbers::ids;

/// The names of axes in Python.
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

/// The blocks of a KV cache that lies in tensors of another library, in host memory.
///
/// The tensors are adopted without a copy, with their strides. They stay alive with this object, and while a job uses
/// it. While a job runs, no other code may write the blocks of a `put`, or use those of a `get`.
///
/// - `tensors`: one a layer, with the same shape; anything with `__dlpack__` (PyTorch, NumPy, JAX, …). With `apart`, first K
///   and then V of each layer: K0, V0, K1, V1, …
/// - `axes`: the meaning of each dimension: "outer" (K and V), "block", "token" (of a block), "slot" (tokens of all blocks),
///   "head", "dim", "row" (all heads of a token), "one". vLLM: "outer block token head dim". SGLang: "slot head dim" with
///   `apart`.
/// - `page_size`: the tokens of a block; needed with "slot".
///
/// Give it to a store as a group: `Store(…, groups=[("kv", cache)])`.
///
/// Raises `StoreError` if the tensors do not fit, and names tensor and axis.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct KvCache {
    endpoint: Endpoint,
}

impl KvCache {
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
}

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (tensors, axes, *, page_size = None, apart = false))]
    fn new(
        tensors: Vec<Bound<'_, PyAny>>,
        axes: &str,
        page_size: Option<u32>,
        apart: bool,
    ) -> PyResult<Self> {
        let imported: Vec<_> = tensors.iter().map(import).collect::<PyResult<_>>()?;
        let axes = axes.split_whitespace().map(axis).collect::<PyResult<Vec<_>>>()?;
        let config = config(&imported, &axes, page_size, apart)?;
        let order = KvAxisOrder::new(&axes).map_err(refused)?;
        let builder = if apart {
            let keys: Vec<_> = imported.iter().step_by(2).cloned().collect();
            let values: Vec<_> = imported.iter().skip(1).step_by(2).cloned().collect();
            adopt_kv(&config, &order, KvTensors::Apart { keys: &keys, values: &values })
        } else {
            adopt_kv(&config, &order, KvTensors::Together(&imported))
        };
        let layout = builder.map_err(refused)?.unregistered().build().map_err(refused)?;
        Ok(Self { endpoint: Endpoint::new(layout).map_err(refused)? })
    }

    /// Blocks by their numbers (a list or an array of integers), whole, or the first `tokens` of each.
    ///
    /// Raises `ValueError` for a number that is not below 2³².
    #[pyo3(signature = (numbers, *, tokens = None))]
    fn blocks(
        slf: &Bound<'_, Self>,
        numbers: &Bound<'_, PyAny>,
        tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Blocks> {
        let mut blocks = NativeBlocks::new(&slf.get().endpoint, &short(numbers)?);
        if let Some(tokens) = tokens {
            blocks = blocks.tokens(&short(tokens)?);
        }
        Ok(Blocks::of_cache(blocks, slf.clone().into_any().unbind()))
    }

    /// The number of blocks.
    fn __len__(&self) -> usize {
        usize::try_from(self.endpoint.layout().geometry().num_blocks()).unwrap_or(0)
    }

    /// The bytes of a block, in all layers.
    #[getter]
    fn block_bytes(&self) -> u64 {
        self.endpoint.layout().geometry().block_bytes().get()
    }
}

fn refused(error: impl std::error::Error) -> PyErr {
    StoreError::new_err(text(&error))
}

fn short(numbers: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let id = |number: usize| {
        u32::try_from(number).map_err(|_| PyValueError::new_err(format!("{number} is no block")))
    };
    ids(numbers)?.into_iter().map(id).collect()
}

fn axis(name: &str) -> PyResult<KvAxis> {
    let found = AXES.iter().find(|(known, _)| *known == name);
    found.map(|(_, axis)| *axis).ok_or_else(|| {
        let known = AXES.map(|(known, _)| known).join(", ");
        PyValueError::new_err(format!("there is no axis {name:?}; the axes are {known}"))
    })
}

/// The dimensions of the cache, from the first tensor. Adopting compares them with all tensors.
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
    let size = |wanted: KvAxis| {
        let at = axes.iter().position(|axis| *axis == wanted)?;
        u32::try_from(*sizes.get(at)?).ok()
    };
    let page = size(KvAxis::Token).or(page_size);
    let page = page.filter(|page| *page > 0);
    let page =
        page.ok_or_else(|| PyValueError::new_err("state page_size, the tokens of a block"))?;
    let blocks = size(KvAxis::Block).or_else(|| Some(size(KvAxis::Slot)? / page)).unwrap_or(0);
    let heads = size(KvAxis::Head).unwrap_or(1);
    let inner = size(KvAxis::Row).or_else(|| size(KvAxis::Dim)?.checked_mul(heads)).unwrap_or(0);
    let width = first.shape().element().width().and_then(|width| u8::try_from(width.get()).ok());
    let width = width.ok_or_else(|| PyTypeError::new_err("the elements are no whole bytes"))?;
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

/// Imports a tensor by DLPack, in the newest structure that its library supports.
fn import(tensor: &Bound<'_, PyAny>) -> PyResult<ImportedTensor> {
    let py = tensor.py();
    let newest = PyDict::new(py);
    newest.set_item("max_version", (1, 0))?;
    let capsule = match tensor.call_method("__dlpack__", (), Some(&newest)) {
        // Libraries older than DLPack 1.0 do not know the argument.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            tensor.call_method0("__dlpack__")?
        }
        other => other?,
    };
    let importer = Importer::new();
    if let Some(taken) = take::<DLManagedTensorVersioned>(&capsule) {
        // SAFETY: the capsule had the tensor by its name, and is renamed, so this is its only owner. By the standard its
        // producer meets the other requirements.
        return unsafe { importer.versioned(taken) }.map_err(refused);
    }
    let taken = take::<DLManagedTensor>(&capsule);
    let taken = taken.ok_or_else(|| PyTypeError::new_err("__dlpack__ returned no new capsule"))?;
    // SAFETY: as above.
    unsafe { importer.legacy(taken) }.map_err(refused)
}

/// Takes the tensor out of a capsule with this structure, by renaming the capsule as the standard demands.
fn take<S: Structure>(capsule: &Bound<'_, PyAny>) -> Option<*mut S> {
    let (capsule, name) = (capsule.as_ptr(), S::CAPSULE.as_ptr());
    // SAFETY: an object, and a text that ends with a zero.
    if unsafe { PyCapsule_IsValid(capsule, name) } == 0 {
        return None;
    }
    // SAFETY: a valid capsule of this name.
    let pointer = unsafe { PyCapsule_GetPointer(capsule, name) };
    // SAFETY: as above; the name lives as long as the program.
    unsafe { PyCapsule_SetName(capsule, S::USED_CAPSULE.as_ptr()) };
    Some(pointer.cast())
}
