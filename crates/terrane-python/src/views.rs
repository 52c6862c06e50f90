//! Caches as tensors for other libraries, by DLPack.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Mutex;

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New, PyObject};
use pyo3::prelude::*;
use terrane_core::sync::lock;
use terrane_interop::dlpack::{ElementType, ManagedTensor, Structure, TensorExport, TypeCode};
use terrane_interop::tensors::{KvAxisOrder, kv_tensors};
use terrane_transfer::{Access, Endpoint};

use crate::errors::{StoreError, text};

/// The names of element types, their codes and their bits.
const TYPES: [(&str, TypeCode, u8); 14] = [
    ("uint8", TypeCode::UInt, 8),
    ("uint16", TypeCode::UInt, 16),
    ("uint32", TypeCode::UInt, 32),
    ("uint64", TypeCode::UInt, 64),
    ("int8", TypeCode::Int, 8),
    ("int16", TypeCode::Int, 16),
    ("int32", TypeCode::Int, 32),
    ("int64", TypeCode::Int, 64),
    ("float16", TypeCode::Float, 16),
    ("float32", TypeCode::Float, 32),
    ("float64", TypeCode::Float, 64),
    ("bfloat16", TypeCode::BFloat, 16),
    ("float8_e4m3fn", TypeCode::Float8E4M3Fn, 8),
    ("float8_e5m2", TypeCode::Float8E5M2, 8),
];

/// DLPack's host memory, which has no device number. Pinned memory is also host memory, and PyTorch accepts it only
/// as such.
const HOST: (u32, i32) = (1, 0);

/// A tensor over a cache in host memory, for `numpy.from_dlpack` or `torch.from_dlpack`, once.
///
/// From `KvCache.tensors` until the last of its tensors is freed, conflicting copies and jobs are refused. These are
/// jobs that write the blocks and, for writable tensors, jobs that read them. If a device reads a tensor directly,
/// that work must complete before the tensor is freed.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct KvTensor {
    shape: Vec<i64>,
    export: Mutex<Option<TensorExport>>,
}

/// The tensors of a cache, in the axis order of an engine.
pub(crate) fn tensors(
    endpoint: &Endpoint,
    order: &KvAxisOrder,
    dtype: &str,
    access: Access,
) -> PyResult<Vec<KvTensor>> {
    if !endpoint.kind().is_host() {
        return Err(PyValueError::new_err(
            "the cache is in device memory; use the tensors of the library that owns them",
        ));
    }
    let known = TYPES.iter().find(|(name, ..)| *name == dtype);
    let &(_, code, bits) = known.ok_or_else(|| {
        let names = TYPES.map(|(name, ..)| name).join(", ");
        PyValueError::new_err(format!("there is no type {dtype:?}; the types are {names}"))
    })?;
    let refused = |error: &dyn std::error::Error| StoreError::new_err(text(error));
    let element = ElementType::new(code, bits, 1).map_err(|error| refused(&error))?;
    let exports = kv_tensors(endpoint, order, element, access).map_err(|error| refused(&error))?;
    let tensor = |export: TensorExport| KvTensor {
        shape: export.shape().sizes().to_vec(),
        export: Mutex::new(Some(export)),
    };
    Ok(exports.into_iter().map(tensor).collect())
}

#[pymethods]
impl KvTensor {
    /// The sizes of the tensor.
    #[getter]
    fn shape(&self) -> Vec<i64> {
        self.shape.clone()
    }

    /// Host memory: `(1, 0)`.
    fn __dlpack_device__(&self) -> (u32, i32) {
        HOST
    }

    /// The tensor in a capsule. Raises `BufferError` on a second call, and if a stream, another device or a copy is
    /// requested.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(u32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let refused = |text: String| Err(PyBufferError::new_err(text));
        if stream.is_some() {
            return refused(String::from("a stream was passed for host memory; pass None"));
        }
        if dl_device.is_some_and(|device| device != HOST) || copy == Some(true) {
            return refused(String::from("the tensor is in host memory, and is not copied"));
        }
        let is_versioned = max_version.is_some_and(|version| version >= (1, 0));
        // The tensor can be exported only if its structure can express read-only memory.
        let is_stated = |export: &mut TensorExport| is_versioned || !export.is_read_only();
        let mut export_slot = lock(&self.export);
        let is_there = export_slot.is_some();
        let matching = export_slot.take_if(is_stated);
        drop(export_slot);
        let Some(export) = matching else {
            return refused(String::from(if is_there {
                "the tensor is read-only, which DLPack before 1.0 cannot state; pass max_version=(1, 0), or request writable=True"
            } else {
                "the tensor was already exported; request the cache's tensors again"
            }));
        };
        let failed = |error: &dyn std::error::Error| PyBufferError::new_err(text(error));
        let export = export.as_host().map_err(|error| failed(&error))?;
        // SAFETY: the documentation of the class requires the consumer to complete device work before it frees the
        // tensor.
        let export = unsafe { export.released_when_done() };
        if is_versioned {
            let tensor = export.into_versioned().map_err(|error| failed(&error))?;
            capsule(py, tensor)
        } else {
            let tensor = export.into_legacy().map_err(|error| failed(&error))?;
            capsule(py, tensor)
        }
    }
}

/// Puts a tensor into a capsule.
fn capsule<S: Structure>(py: Python<'_>, tensor: ManagedTensor<S>) -> PyResult<Bound<'_, PyAny>> {
    let tensor = tensor.into_raw();
    let (content, name): (*mut c_void, _) = (tensor.as_ptr().cast(), S::CAPSULE.as_ptr());
    // SAFETY: a live tensor, a name that lives as long as the program, and the destructor for such a capsule.
    let capsule = unsafe { PyCapsule_New(content, name, Some(destroy::<S>)) };
    // SAFETY: a new reference, or null with Python's error set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    capsule.inspect_err(|_| {
        // SAFETY: no capsule owns the tensor.
        drop(unsafe { ManagedTensor::from_raw(tensor) });
    })
}

/// Deletes the tensor of a capsule, unless its name shows that a consumer has taken it.
///
/// # Safety
///
/// Only Python may call it, as the destructor of a capsule.
unsafe extern "C" fn destroy<S: Structure>(capsule: *mut PyObject) {
    // SAFETY: a capsule, and a string that ends with a zero byte.
    if unsafe { PyCapsule_IsValid(capsule, S::CAPSULE.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: a valid capsule with this name.
    let tensor = unsafe { PyCapsule_GetPointer(capsule, S::CAPSULE.as_ptr()) };
    if let Some(tensor) = NonNull::new(tensor.cast::<S>()) {
        // SAFETY: by its name, the capsule owns the tensor, and it is freed now.
        drop(unsafe { ManagedTensor::from_raw(tensor) });
    }
}
