//! Imports foreign arrays as columns without a copy, checked field by field.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use arrow_schema::DataType;
use terrane_core::StorageKind;
use terrane_cuda::{Context, Stream};

use super::abi::{ArrowArray, ArrowDeviceArray, Owned};
use super::error::{ImportError, Trail, aligned};
use super::export;
use super::offsets::{InHost, InOrder, NotYet, OffsetReader};
use super::schema::check_type;
use super::walk::{Import, Place};
use crate::columns::{Column, exported_memory};

/// Imports a foreign array of host memory as a column of this type, without a copy.
///
/// The column keeps the array alive. The array is released when the last user of the memory drops.
/// A refused array is released before this returns. For an array from
/// [`export_array`](super::export_array), the result is the original column. It is read-only if
/// other libraries still have its memory. An array of another library over memory that Terrane has
/// exported results in a read-only column over that memory.
///
/// All structures are checked, and the first and last offsets. Other values are not checked:
/// neither the offsets in between, nor whether texts are UTF-8. [`to_arrow`](super::to_arrow)
/// checks these.
///
/// # Errors
///
/// [`ImportError`]. The array has been released.
///
/// # Safety
///
/// - The array obeys the specification. Its non-null pointers refer to as many buffers and children
///   as it states. Each buffer has as many bytes as its type, length, offset and offsets require.
///   The size behind a C pointer is unknown, so this cannot be checked.
/// - The bytes are in host memory, and do not change until the array is released.
pub unsafe fn import_array(
    data_type: &DataType,
    array: Owned<ArrowArray>,
) -> Result<Column, ImportError> {
    check_type(data_type)?;
    // SAFETY: the caller's promise.
    if let Some(column) = unsafe { came_back(data_type, array.get()) }? {
        // Dropped first, so that this array does not count as a user of the memory.
        drop(array);
        return Ok(exported_memory::returned(column));
    }
    let owner = Arc::new(array);
    let import = Import { owner: owner.clone(), place: Place::SYSTEM, reader: &InHost };
    // SAFETY: the caller's promise.
    unsafe { import.column(data_type, owner.get(), Trail::TOP) }
}

/// Imports a foreign array with its device as a column of this type, without a copy. The array is
/// in host memory, pinned memory, or memory of a CUDA device.
///
/// Checks that need no device are done at once. The remaining checks follow with the
/// [wait](ImportedArray::wait_on) for the producer's event, which returns the column.
///
/// # Errors
///
/// [`ImportError`]. The array has been released.
///
/// # Safety
///
/// As for [`import_array`], for memory of the device that the array names. The event is null, or an
/// event of that device that lives until the array is released.
pub unsafe fn import_device_array(
    data_type: &DataType,
    array: Owned<ArrowDeviceArray>,
) -> Result<ImportedArray, ImportError> {
    check_type(data_type)?;
    // The reserved fields are not checked: Arrow C++ leaves them uninitialised.
    let ArrowDeviceArray { device_id, device_type, sync_event, .. } = *array.get();
    let place = Place::new(device_type, device_id)?;
    if place.kind == StorageKind::System && !sync_event.is_null() {
        return Err(ImportError::UnexpectedEvent { device_type });
    }
    aligned(sync_event.cast::<*mut c_void>(), "sync_event", Trail::TOP)?;
    let event = NonNull::new(sync_event.cast::<*mut c_void>()).map(|event| {
        // SAFETY: by the caller's promise, it points to an event's handle until the array is
        // released.
        EventHandle(unsafe { event.read() })
    });
    if event.as_ref().is_some_and(|event| event.0.is_null()) {
        return Err(ImportError::Null { what: "the event of sync_event", at: Trail::TOP.path() });
    }
    // SAFETY: the caller's promise.
    let came_back = unsafe { came_back(data_type, &array.get().array) }?;
    let owner = Arc::new(Owned::<ArrowArray>::from(array));
    if came_back.is_none() {
        let import = Import { owner: owner.clone(), place, reader: &NotYet };
        // SAFETY: the caller's promise. This reads no bytes that the device may still write.
        unsafe { import.column(data_type, owner.get(), Trail::TOP) }?;
    }
    Ok(ImportedArray { data_type: data_type.clone(), owner, place, event, came_back })
}

/// A foreign array whose fields have been checked. Its producer's work may still be running.
#[must_use = "dropping it releases the array"]
pub struct ImportedArray {
    data_type: DataType,
    owner: Arc<Owned<ArrowArray>>,
    place: Place,
    event: Option<EventHandle>,
    came_back: Option<Column>,
}

/// The producer's `CUevent`, which lives until the array is released.
struct EventHandle(*mut c_void);

// SAFETY: the driver accepts an event's handle on any thread, and synchronises.
unsafe impl Send for EventHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for EventHandle {}

impl ImportedArray {
    /// The kind of memory.
    #[must_use]
    pub const fn kind(&self) -> StorageKind {
        self.place.kind
    }

    /// Whether there is an event to wait for.
    #[must_use]
    pub const fn has_event(&self) -> bool {
        self.event.is_some()
    }

    /// The column, for work that is submitted to `stream` from now on. The stream waits for the
    /// producer's event; the thread does not. If the type has offsets, they are read in the
    /// stream's order, and the thread waits for this read.
    ///
    /// The driver checks that the buffers are memory of its device.
    ///
    /// # Errors
    ///
    /// [`ImportError::WrongDevice`] if the stream is of another device, [`ImportError::Cuda`], and
    /// the errors of [`import_array`]. The array has been released.
    pub fn wait_on(self, stream: &Stream) -> Result<Column, ImportError> {
        let waited = stream.context().device().id;
        if let StorageKind::Device(array) = self.place.kind
            && array != waited
        {
            return Err(ImportError::WrongDevice { array, waited });
        }
        if let Some(event) = &self.event {
            // SAFETY: the event lives until the array is released, and `self` keeps the array. The
            // importer guaranteed that it is valid.
            unsafe { stream.wait_for_handle(event.0) }?;
        }
        self.column(&InOrder(stream))
    }

    /// The column, after the thread has waited for the producer's event.
    ///
    /// # Errors
    ///
    /// As for [`wait_on`](Self::wait_on).
    pub fn wait(self, context: &Context) -> Result<Column, ImportError> {
        let stream = Stream::new(context)?;
        let column = self.wait_on(&stream)?;
        stream.synchronize()?;
        Ok(column)
    }

    /// The column, if it is in host memory and there is no event to wait for.
    ///
    /// # Errors
    ///
    /// [`ImportError::NotReady`] if it is not, and the errors of [`import_array`]. The array has
    /// been released.
    pub fn into_host(self) -> Result<Column, ImportError> {
        if !self.place.kind.is_host() || self.event.is_some() {
            return Err(ImportError::NotReady);
        }
        self.column(&InHost)
    }

    fn column(self, reader: &dyn OffsetReader) -> Result<Column, ImportError> {
        let Self { data_type, owner, place, came_back, .. } = self;
        if let Some(column) = came_back {
            // Dropped first, so that this array does not count as a user of the memory.
            drop(owner);
            return Ok(exported_memory::returned(column));
        }
        let import = Import { owner: owner.clone(), place, reader };
        // SAFETY: the importer guaranteed the array, and nothing has been released.
        unsafe { import.column(&data_type, owner.get(), Trail::TOP) }
    }
}

impl fmt::Debug for ImportedArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ImportedArray")
            .field("data_type", &self.data_type)
            .field("kind", &self.place.kind)
            .field("has_event", &self.event.is_some())
            .finish_non_exhaustive()
    }
}

/// The original column of an array that this crate made.
///
/// # Safety
///
/// As for [`export::exported`].
unsafe fn came_back(
    data_type: &DataType,
    array: &ArrowArray,
) -> Result<Option<Column>, ImportError> {
    // SAFETY: the caller's promise.
    let Some(column) = (unsafe { export::exported(array) }) else { return Ok(None) };
    let column = column.map_err(|what| ImportError::Changed { what })?;
    if !column.data_type().equals_datatype(data_type) {
        let (expected, found) = (data_type.clone(), column.data_type().clone());
        return Err(ImportError::WrongType { expected, found });
    }
    Ok(Some(column))
}
