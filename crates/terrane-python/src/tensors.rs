//! Tensors of other libraries, imported by DLPack or by their addresses.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi::{PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use terrane_core::convert::to_u64;
use terrane_core::{
    DeviceAddress, DeviceId, ForeignMemory, HostAddress, Location, Region, Span, StorageKind,
};
use terrane_cuda::Context;
use terrane_interop::dlpack::ffi::{DLManagedTensor, DLManagedTensorVersioned};
use terrane_interop::dlpack::{
    ElementType, ImportedTensor, Importer, Structure, TensorExport, TensorShape, TypeCode,
};

use crate::device;
use crate::errors::{StoreError, text};
use crate::numbers::ids;
use crate::torch;

/// The number of the device type CUDA in DLPack.
const CUDA: u32 = 2;

/// Imports a tensor by DLPack, with the newest structure that its library supports.
///
/// A tensor of a device is imported without ordering streams, because each job has its own order.
pub(crate) fn import(tensor: &Bound<'_, PyAny>) -> PyResult<ImportedTensor> {
    let py = tensor.py();
    let mut importer = Importer::new();
    let options = PyDict::new(py);
    let mut is_of_device = false;
    if let Ok(device) = tensor.call_method0("__dlpack_device__")
        && let Ok((CUDA, number)) = device.extract::<(u32, u32)>()
    {
        let context = py.detach(|| device::context(DeviceId::new(number)))?;
        importer = importer.with_device(context);
        options.set_item("stream", -1)?;
        is_of_device = true;
    }
    let capsule = if is_of_device {
        torch::on_device_of(tensor, || capsule(tensor, &options))?
    } else {
        capsule(tensor, &options)?
    };
    let imported = imported(&importer, &capsule)?;
    if imported.is_copied() {
        return Err(StoreError::new_err(
            "the tensor's library exports a copy of it, which the cache would not share; pass a tensor that it exports without a copy",
        ));
    }
    Ok(imported)
}

/// The capsule of a tensor, with the newest structure that its library supports.
fn capsule<'py>(
    tensor: &Bound<'py, PyAny>,
    options: &Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyAny>> {
    let export = |options: &Bound<'py, PyDict>| tensor.call_method("__dlpack__", (), Some(options));
    let is_unknown = |error: &PyErr| error.is_instance_of::<PyTypeError>(tensor.py());
    let versioned = options.copy()?;
    versioned.set_item("max_version", (1, 0))?;
    let newest = versioned.copy()?;
    newest.set_item("copy", false)?;
    // Older libraries do not support `copy`, and those before DLPack 1.0 support neither argument.
    match export(&newest) {
        Err(error) if is_unknown(&error) => {}
        other => return other,
    }
    match export(&versioned) {
        Err(error) if is_unknown(&error) => export(options),
        other => other,
    }
}

/// The tensor of a new capsule.
fn imported(importer: &Importer, capsule: &Bound<'_, PyAny>) -> PyResult<ImportedTensor> {
    if let Some(tensor) = take::<DLManagedTensorVersioned>(capsule) {
        // SAFETY: the capsule's name proves that it contains the tensor. The capsule was renamed, so this is the
        // tensor's only owner. By the standard, its producer meets the other requirements.
        return unsafe { importer.versioned(tensor) }.map_err(refused);
    }
    let tensor = take::<DLManagedTensor>(capsule);
    let tensor =
        tensor.ok_or_else(|| PyTypeError::new_err("__dlpack__ returned no new capsule"))?;
    // SAFETY: as above.
    unsafe { importer.legacy(tensor) }.map_err(refused)
}

/// Takes the tensor out of a capsule with this structure. The standard requires renaming the capsule.
fn take<S: Structure>(capsule: &Bound<'_, PyAny>) -> Option<*mut S> {
    let (capsule, name) = (capsule.as_ptr(), S::CAPSULE.as_ptr());
    // SAFETY: an object, and a string that ends with a zero byte.
    if unsafe { PyCapsule_IsValid(capsule, name) } == 0 {
        return None;
    }
    // SAFETY: a valid capsule with this name.
    let pointer = unsafe { PyCapsule_GetPointer(capsule, name) };
    // SAFETY: as above, and the name lives as long as the program.
    unsafe { PyCapsule_SetName(capsule, S::USED_CAPSULE.as_ptr()) };
    Some(pointer.cast())
}

/// The memory of addresses, as a Python argument: "host", "pinned", or the number of a CUDA device.
#[derive(FromPyObject)]
pub(crate) enum MemoryName {
    Device(u32),
    Host(String),
}

impl MemoryName {
    /// The kind of the memory.
    pub(crate) fn kind(&self) -> PyResult<StorageKind> {
        match self {
            Self::Device(number) => Ok(StorageKind::Device(DeviceId::new(*number))),
            Self::Host(name) if name == "host" => Ok(StorageKind::System),
            Self::Host(name) if name == "pinned" => Ok(StorageKind::Pinned),
            Self::Host(name) => Err(PyValueError::new_err(format!(
                "there is no memory {name:?}; pass \"host\", \"pinned\", or the number of a CUDA device"
            ))),
        }
    }
}

/// The shape of tensors that are adopted by their addresses. Strides count elements; `None` means compact.
pub(crate) fn shape(
    element_bytes: u8,
    sizes: &[u64],
    strides: Option<&[u64]>,
) -> PyResult<TensorShape> {
    let bits = element_bytes.checked_mul(8).unwrap_or(0);
    let element = ElementType::new(TypeCode::UInt, bits, 1)
        .map_err(|error| PyValueError::new_err(text(&error)))?;
    match strides {
        None => TensorShape::compact(element, sizes),
        Some(strides) => TensorShape::strided(element, sizes, strides),
    }
    .map_err(|error| PyValueError::new_err(text(&error)))
}

/// The tensor whose first element is at an address. `owner` keeps the memory alive. For device memory, `context` is
/// the device's, and the driver checks the address.
///
/// # Safety
///
/// While `owner` lives, the bytes from the first element to the last must be valid memory of this kind, and
/// initialised.
unsafe fn at(
    address: usize,
    kind: StorageKind,
    shape: &TensorShape,
    owner: impl Send + Sync + 'static,
    context: Option<&Context>,
) -> PyResult<ImportedTensor> {
    let null = || PyValueError::new_err("a pointer is 0");
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address);
    let pointer = NonNull::new(pointer).ok_or_else(null)?;
    let mut importer = Importer::new();
    if let Some(context) = context {
        importer = importer.with_device(context.clone());
    }
    let location = match kind {
        StorageKind::Device(device) => {
            Location::Device { device, address: DeviceAddress::new(to_u64(address)) }
        }
        _ => Location::Host(HostAddress::new(pointer)),
    };
    let span = Span { kind, location, length: shape.bytes() };
    // SAFETY: the caller's promise.
    let memory = unsafe { ForeignMemory::new(span, owner) };
    // SAFETY: the tensor is passed to the importer below, and Python's caller orders its users.
    let export = unsafe { TensorExport::new(Region::new(memory), shape.clone()) };
    // SAFETY: the importer's users are jobs, which end before they drop the tensor.
    let export = unsafe { export.map_err(refused)?.released_when_done() };
    let tensor = export.into_versioned().map_err(refused)?.into_raw();
    // SAFETY: the tensor was created above, and no other code has it.
    unsafe { importer.versioned(tensor.as_ptr()) }.map_err(refused)
}

/// The memory of tensors that are adopted by their addresses.
pub(crate) struct Origin {
    kind: StorageKind,
    owner: Arc<dyn Any + Send + Sync>,
    context: Option<Context>,
}

impl Origin {
    /// Memory of this kind, which `owner` keeps alive.
    pub(crate) fn new(
        py: Python<'_>,
        memory: &MemoryName,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> PyResult<Self> {
        let kind = memory.kind()?;
        let context = match kind {
            // Loads the driver, with the GIL released.
            StorageKind::Device(device) => Some(py.detach(|| device::context(device))?),
            _ => None,
        };
        Ok(Self { kind, owner, context })
    }

    /// The tensors of one shape at these addresses.
    ///
    /// # Safety
    ///
    /// As for [`at`], for each address, while the owner lives.
    pub(crate) unsafe fn tensors(
        &self,
        pointers: &Bound<'_, PyAny>,
        shape: &TensorShape,
    ) -> PyResult<Vec<ImportedTensor>> {
        let import = |pointer| {
            // SAFETY: the caller's promise.
            unsafe { at(pointer, self.kind, shape, Arc::clone(&self.owner), self.context.as_ref()) }
        };
        ids(pointers)?.into_iter().map(import).collect()
    }
}

fn refused(error: impl std::error::Error) -> PyErr {
    StoreError::new_err(text(&error))
}
