//! Exports columns as Arrow arrays, on the host and with their device.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::AtomicPtr;

use terrane_core::{ByteCount, Location, StorageKind};
use terrane_cuda::{CudaError, Event, Stream, Timing};
use terrane_interop::release_order::{catch_panic, release_after};

use super::abi::{ArrowArray, ArrowDeviceArray, DeviceType, Owned, Released};
use super::error::ExportError;
use super::release_order::ReleaseOrder;
use crate::columns::exported_memory::ExportedMemory;
use crate::columns::{Column, ColumnBuffer, shape};

/// When the consumer may read the bytes of a column on a device.
#[derive(Debug, Default)]
pub enum Ready {
    /// Now: all writers have completed, and no code writes the bytes while the consumer uses them.
    #[default]
    Now,
    /// After this event. The consumer waits for it on its own stream. No other code has the event,
    /// so it is not recorded again.
    After(Event),
}

impl Ready {
    /// After all work that has been submitted to `stream` so far.
    ///
    /// # Errors
    ///
    /// [`CudaError::Driver`] and [`CudaError::ContextLost`].
    pub fn after(stream: &Stream) -> Result<Self, CudaError> {
        let event = Event::new(stream.context(), Timing::Off)?;
        event.record(stream)?;
        Ok(Self::After(event))
    }
}

/// Exports a column of host memory as an Arrow array, with the C Data Interface.
///
/// The array keeps the memory alive until its consumer releases it, on any thread.
///
/// ```
/// use arrow_schema::{DataType, Field};
/// use terrane_core::{Allocate, ByteCount, Region, RegionRequest};
/// use terrane_arrow::arrays::{export_array, export_field, import_array, import_field};
/// use terrane_arrow::columns::Column;
/// use terrane_storage::{SystemAllocator, SystemOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let memory = SystemAllocator::new(SystemOptions::default());
/// let memory = memory.allocate(&RegionRequest::new(ByteCount::new(4 * 1000)))?;
/// let column = Column::new(DataType::UInt32, 1000, Region::new(memory))?;
///
/// // SAFETY: no code writes the memory, and any bytes are valid numbers.
/// let array = unsafe { export_array(&column) }?;
/// let mut schema = export_field(&Field::new("tokens", DataType::UInt32, false))?.into_inner();
/// // Another library receives both structures and returns them:
/// // SAFETY: both are valid structures, and are imported once.
/// let field = unsafe { import_field(&raw mut schema) }?;
/// // SAFETY: as above.
/// let back = unsafe { import_array(field.data_type(), array) }?;
/// assert!(back.is_same(&column), "this very memory, and no foreign wrapper of it");
/// # Ok(())
/// # }
/// ```
///
/// # Errors
///
/// [`ExportError::NotHost`] for memory that the processor cannot access.
///
/// # Safety
///
/// Consumers expect immutable arrays with valid values. Until the array is released, no code may
/// write the column's memory; this includes transfers. The values must obey the rules of their
/// type: offsets do not decrease and stay within their data, texts are UTF-8, and keys are in their
/// dictionary. [`to_arrow`](super::to_arrow) checks these rules.
pub unsafe fn export_array(column: &Column) -> Result<Owned<ArrowArray>, ExportError> {
    if let Some(kind) = column.kind().filter(|kind| !kind.is_host()) {
        return Err(ExportError::NotHost { kind });
    }
    array(column, None, None)
}

/// Exports a column as an Arrow array with its device, with the C Device Data Interface. The column
/// is in system memory, in pinned memory, or on a CUDA device. [`ReleaseOrder`] states when its
/// memory may be freed.
///
/// Pinned memory is exported as memory of device 0, as with DLPack. An array on a device, or in
/// pinned memory, may have an event after which it is ready. The event is kept until the array is
/// released.
///
/// # Errors
///
/// [`ExportError::NoDevice`] for other kinds of memory. [`ExportError::Mixed`] for several kinds.
/// [`ExportError::Event`] if the event's last record failed. [`ExportError::UnexpectedEvent`] for
/// an event with system memory. [`ExportError::EventOfOther`] for an event of another device.
///
/// # Safety
///
/// As for [`export_array`], from the time when the array is [`Ready`] until the consumer has
/// finished. With [`ReleaseOrder::AtRelease`], the following also holds when the consumer releases
/// the array, or a child that it moved out: all device work that it submitted on the memory has
/// completed.
pub unsafe fn export_device_array(
    column: &Column,
    ready: Ready,
    release: ReleaseOrder,
) -> Result<Owned<ArrowDeviceArray>, ExportError> {
    let kind = column.kind().unwrap_or(StorageKind::System);
    if let Some(second) = other_kind(column, kind) {
        return Err(ExportError::Mixed { first: kind, second });
    }
    let (device_type, device_id) = match kind {
        StorageKind::System => (DeviceType::CPU, -1),
        StorageKind::Pinned => (DeviceType::CUDA_HOST, 0),
        StorageKind::Device(device) => (DeviceType::CUDA, i64::from(device.get())),
        kind => return Err(ExportError::NoDevice { kind }),
    };
    let event = match ready {
        Ready::Now => None,
        Ready::After(_) if kind == StorageKind::System => {
            return Err(ExportError::UnexpectedEvent { kind });
        }
        Ready::After(event) => {
            let found = event.context().device().id;
            if let StorageKind::Device(device) = kind
                && device != found
            {
                return Err(ExportError::EventOfOther { device, found });
            }
            event.is_complete().map_err(|source| ExportError::Event { source })?;
            Some(HeldEvent { handle: Box::new(AtomicPtr::new(event.handle())), _event: event })
        }
    };
    let consumer = match release {
        ReleaseOrder::AtRelease => None,
        ReleaseOrder::After(stream) => Some(stream),
    };
    let array = array(column, event, consumer.as_ref())?.into_inner();
    let private: *const Exported = array.private_data.cast();
    // SAFETY: the private data of the array created above, which stays there until the array is
    // released.
    let private = unsafe { &*private };
    // The handle has its final address now.
    let sync_event = private.event.as_ref().map_or(ptr::null_mut(), HeldEvent::pointer);
    let array =
        ArrowDeviceArray { array, device_id, device_type, sync_event, ..ArrowDeviceArray::EMPTY };
    // SAFETY: the inner array is this crate's, taken out of its owner above.
    Ok(unsafe { Owned::new(array) })
}

/// Whether [`export_array`] or [`export_device_array`] created the array. An import then returns
/// the original column.
#[must_use]
pub fn is_exported(array: &ArrowArray) -> bool {
    // A single static, so that both sides compare the same address of the function.
    array.release.is_some_and(|release| ptr::fn_addr_eq(release, RELEASE))
}

/// The original column, if this crate created the array and it has not been released.
///
/// # Safety
///
/// The array's callback and private data belong together, as its producer set them.
pub(crate) unsafe fn exported(array: &ArrowArray) -> Option<Result<Column, &'static str>> {
    if !is_exported(array) {
        return None;
    }
    let private: *const Exported = array.private_data.cast();
    // SAFETY: an array with this callback has private data of this crate, which is alive until the
    // callback is called.
    let private = unsafe { private.as_ref() }?;
    Some(private.unchanged(array).map(|()| private.column.clone()))
}

type Release = unsafe extern "C" fn(*mut ArrowArray);

static RELEASE: Release = release_exported;

/// The private data of an exported array: everything that its pointers refer to.
struct Exported {
    /// Dropped before the column, whose memory it describes.
    out: ExportedMemory,
    column: Column,
    buffers: Box<[*const c_void]>,
    /// The lengths of the data of views. The last buffer points to them.
    _sizes: Option<Box<[i64]>>,
    children: Box<[*mut ArrowArray]>,
    dictionary: *mut ArrowArray,
    event: Option<HeldEvent>,
    /// The stream to wait for before the memory is freed.
    consumer: Option<Stream>,
}

/// An event, and the address of its handle. Consumers get a pointer to the handle.
struct HeldEvent {
    /// Never changed. It is atomic only to be `Send`, and has the layout of a pointer.
    handle: Box<AtomicPtr<c_void>>,
    _event: Event,
}

impl HeldEvent {
    fn pointer(&self) -> *mut c_void {
        self.handle.as_ptr().cast()
    }
}

impl Exported {
    /// Whether the array has the same contents as when it was created.
    fn unchanged(&self, array: &ArrowArray) -> Result<(), &'static str> {
        let same = |found: i64, made: u64| u64::try_from(found) == Ok(made);
        let count = |length: usize| u64::try_from(length).unwrap_or(u64::MAX);
        if !same(array.length, self.column.len()) {
            return Err("length");
        }
        if !same(array.offset, self.column.offset()) {
            return Err("offset");
        }
        if !same(array.n_buffers, count(self.buffers.len())) {
            return Err("n_buffers");
        }
        if !same(array.n_children, count(self.children.len())) {
            return Err("n_children");
        }
        if !ptr::eq(array.buffers, self.buffers.as_ptr()) {
            return Err("buffers");
        }
        if !ptr::eq(array.children, self.children.as_ptr()) {
            return Err("children");
        }
        if !ptr::eq(array.dictionary, self.dictionary) {
            return Err("dictionary");
        }
        match (array.null_count, self.column.null_count()) {
            (-1, None) => {}
            (found, Some(nulls)) if same(found, nulls) => {}
            _ => return Err("null_count"),
        }
        for &below in self.children.iter().chain([&self.dictionary]) {
            // SAFETY: null, or boxed when the array was created. The array frees the box on
            // release.
            let below = unsafe { below.as_ref() };
            if below.is_some_and(Released::is_released) {
                return Err("children (some were moved away)");
            }
        }
        Ok(())
    }
}

fn array(
    column: &Column,
    event: Option<HeldEvent>,
    consumer: Option<&Stream>,
) -> Result<Owned<ArrowArray>, ExportError> {
    let number =
        |what, value: u64| i64::try_from(value).map_err(|_| ExportError::TooLarge { what, value });
    let length = number("the number of rows", column.len())?;
    let offset = number("the offset", column.offset())?;
    let null_count = match column.null_count() {
        Some(nulls) => number("the number of nulls", nulls)?,
        None => -1,
    };
    let mut buffers: Box<[_]> = column.buffers().iter().map(pointer).collect();
    let sizes = sizes_of_data(column)?;
    if let (Some(sizes), Some(last)) = (&sizes, buffers.last_mut()) {
        *last = sizes.as_ptr().cast();
    }
    let children = column.children().iter().map(|child| array(child, None, consumer));
    let children = children.collect::<Result<Vec<_>, _>>()?;
    let dictionary = column.dictionary().map(|values| array(values, None, consumer)).transpose()?;
    // Nothing fails after this line, so nothing boxed is leaked.
    let boxed = |array: Owned<ArrowArray>| Box::into_raw(Box::new(array.into_inner()));
    let private = Box::new(Exported {
        out: ExportedMemory::new(column),
        column: column.clone(),
        buffers,
        _sizes: sizes,
        children: children.into_iter().map(boxed).collect(),
        dictionary: dictionary.map_or(ptr::null_mut(), boxed),
        event,
        consumer: consumer.cloned(),
    });
    let count = |length: usize| i64::try_from(length).unwrap_or(i64::MAX);
    let array = ArrowArray {
        length,
        null_count,
        offset,
        n_buffers: count(private.buffers.len()),
        n_children: count(private.children.len()),
        buffers: private.buffers.as_ptr().cast_mut(),
        children: private.children.as_ptr().cast_mut(),
        dictionary: private.dictionary,
        release: Some(RELEASE),
        private_data: Box::into_raw(private).cast(),
    };
    // SAFETY: the callback frees the private data once, on any thread, and everything that it owns
    // is `Send`.
    Ok(unsafe { Owned::new(array) })
}

/// The lengths of the data of views. Consumers read them on the host, even if the other buffers are
/// elsewhere.
fn sizes_of_data(column: &Column) -> Result<Option<Box<[i64]>>, ExportError> {
    if !shape::is_view(column.data_type()) {
        return Ok(None);
    }
    let size = |data: &Option<ColumnBuffer>| {
        let bytes = data.as_ref().map_or(ByteCount::ZERO, ColumnBuffer::length).get();
        let what = "the length of data";
        i64::try_from(bytes).map_err(|_| ExportError::TooLarge { what, value: bytes })
    };
    let [_, _, data @ .., _] = column.buffers() else { return Ok(Some(Box::default())) };
    data.iter().map(size).collect::<Result<_, _>>().map(Some)
}

/// The memory kind of a buffer that differs from `kind`, if any.
fn other_kind(column: &Column, kind: StorageKind) -> Option<StorageKind> {
    let own = shape::placed(column.data_type(), column.buffers()).iter().flatten();
    let own = own.map(ColumnBuffer::kind);
    let mut below = column.children().iter().chain(column.dictionary());
    own.into_iter()
        .find(|found| *found != kind)
        .or_else(|| below.find_map(|column| other_kind(column, kind)))
}

/// The start of a buffer as a pointer; null if the buffer is omitted.
fn pointer(buffer: &Option<ColumnBuffer>) -> *const c_void {
    match buffer.as_ref().map(ColumnBuffer::location) {
        Some(Location::Host(address)) => address.as_ptr().cast_const().cast(),
        Some(Location::Device { address, .. }) => {
            let address = ByteCount::new(address.get()).to_usize();
            ptr::without_provenance(address)
        }
        _ => ptr::null(),
    }
}

/// The release callback. It frees the memory, the dictionary, and the children that have not been
/// moved out. A second call does nothing. If the drop of the memory's owner panics, the panic is
/// caught, because the consumer's code is not Rust. Everything else is still freed.
///
/// # Safety
///
/// The pointer is null, or points to an array that this module created, or to the destination of a
/// move of such an array.
unsafe extern "C" fn release_exported(array: *mut ArrowArray) {
    // SAFETY: null, or an array that only the caller uses during its release.
    let Some(array) = (unsafe { array.as_mut() }) else { return };
    let private: *mut Exported = array.private_data.cast();
    if array.release.take().is_none() || private.is_null() {
        return;
    }
    array.private_data = ptr::null_mut();
    // SAFETY: it was boxed when the array was created. The array has not been released, and drops
    // its pointer.
    let private = unsafe { Box::from_raw(private) };
    for &child in private.children.iter().chain([&private.dictionary]) {
        if child.is_null() {
            continue;
        }
        // SAFETY: boxed when the array was created, and freed only here.
        let mut child = unsafe { Box::from_raw(child) };
        if !child.is_released() {
            // SAFETY: it has not been released or moved: a move would have marked it released.
            unsafe { child.release() };
        }
    }
    let Exported { out, column, event, consumer, .. } = *private;
    catch_panic(|| release_after(consumer.as_ref(), (out, column, event)));
}
