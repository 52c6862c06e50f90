//! Imports and exports of single tensors.

use std::ffi::c_void;
use std::ptr::NonNull;

use terrane_core::convert::to_u64;
use terrane_core::{
    Alignment, Allocate, BoxedCause, ByteCount, DeviceId, Location, Memory, Region, RegionRequest,
    delegate_memory,
};
use terrane_cuda::{Context, DeviceAllocator, PinnedAllocator, PinnedOptions, Stream};
use terrane_interop::dlpack::{
    ConsumerStream, ElementType, ImportedTensor, Importer, ProducerStream, TensorDevice,
    TensorExport, TensorShape, TypeCode, handshake,
};
use terrane_storage::{SystemAllocator, SystemOptions};

use crate::calls::{answer, drop_value};
use crate::live_counts::{LiveCount, Resource};

/// Memory that is counted until it drops.
#[derive(Debug)]
struct Counted<M> {
    memory: M,
    _entry: LiveCount,
}

// SAFETY: all methods delegate to the memory, which is neither moved nor dropped before `self`.
unsafe impl<M: Memory> Memory for Counted<M> {
    delegate_memory!(self, self.memory);
}

/// Allocates this number of bytes of `allocator`, counted.
pub(crate) fn counted<A: Allocate<Memory: Memory>>(
    allocator: &A,
    bytes: ByteCount,
) -> Result<Region, BoxedCause> {
    let request = RegionRequest::new(bytes).aligned_to(Alignment::SECTOR).labelled("proof");
    let memory = allocator.allocate(&request)?;
    Ok(Region::new(Counted { memory, _entry: LiveCount::new(Resource::Memory) }))
}

/// The properties of a tensor to export.
#[repr(C)]
pub struct TensorRequest {
    code: u8,
    bits: u8,
    lanes: u16,
    /// 1: read-only, 2: legacy, 4: by offset, 8: pinned memory of the device, 16: pinned memory
    /// declared as host memory.
    options: u32,
    axes: usize,
    sizes: *const u64,
    /// Null for a compact tensor.
    strides: *const u64,
    /// A device's number, or −1 for the host.
    device: i32,
    /// The consumer's stream, if one is stated.
    is_stated: i32,
    stream: i64,
}

const READ_ONLY: u32 = 1;
const LEGACY: u32 = 2;
const BY_OFFSET: u32 = 4;
const PINNED: u32 = 8;
const AS_HOST: u32 = 16;

/// The offset of a tensor in its memory.
const LEAD: u64 = 256;

/// Creates a tensor in this library's memory, whose byte `i` is `i` · 7 + 3. Writes the pointer to
/// its managed structure. For device memory, the deleter waits for the consumer's stream.
///
/// # Safety
///
/// `request` is valid, with as many sizes and strides as axes. Its stream, if it is a handle, lives
/// as long as the tensor. Without a stream (−1), and for pinned memory, the consumer waits before
/// it releases the tensor. `tensor` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_export(
    request: *const TensorRequest,
    tensor: *mut *mut c_void,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let request = unsafe { &*request };
        // SAFETY: the caller's promise.
        let sizes = unsafe { std::slice::from_raw_parts(request.sizes, request.axes) };
        let code = TypeCode::from_number(request.code).ok_or("no such type code")?;
        let element = ElementType::new(code, request.bits, request.lanes)?;
        let shape = if request.strides.is_null() {
            TensorShape::compact(element, sizes)?
        } else {
            // SAFETY: the caller's promise.
            let strides = unsafe { std::slice::from_raw_parts(request.strides, request.axes) };
            TensorShape::strided(element, sizes, strides)?
        };
        let whole = shape.bytes().checked_add(ByteCount::new(LEAD))?;
        let is = |option: u32| request.options & option != 0;
        let device = u32::try_from(request.device).ok().map(DeviceId::new);
        let context = device.map(Context::primary).transpose()?;
        let region = match &context {
            None => {
                let region = counted(&SystemAllocator::new(SystemOptions::default()), whole)?;
                fill_host(&region, LEAD);
                region
            }
            Some(context) if is(PINNED) => {
                let pinned = PinnedAllocator::new(context, PinnedOptions::default())?;
                let region = counted(&pinned, whole)?;
                fill_host(&region, LEAD);
                region
            }
            Some(context) => {
                let region = counted(&DeviceAllocator::new(context), whole)?;
                fill_device(context, &region)?;
                region
            }
        };
        let region = region.view(ByteCount::new(LEAD), shape.bytes())?;
        // SAFETY: only the consumer uses the memory, which was allocated above.
        let mut export = unsafe { TensorExport::new(region, shape) }?;
        let stated = (request.is_stated != 0).then_some(request.stream);
        let consumer = ConsumerStream::from_python(export.device(), stated)?;
        let stream = match &context {
            // SAFETY: the caller's promise about the stream.
            Some(context) if !is(PINNED) => unsafe { consumer.to_stream(context, ()) }?,
            _ => None,
        };
        export = match stream {
            Some(stream) => export.released_after(stream),
            // SAFETY: the caller's promise about the consumer.
            None => unsafe { export.released_when_done() },
        };
        if is(AS_HOST) {
            export = export.as_host()?;
        }
        if is(READ_ONLY) {
            export = export.read_only();
        }
        if is(BY_OFFSET) {
            export = export.by_offset();
        }
        let pointer: NonNull<c_void> = if is(LEGACY) {
            export.into_legacy()?.into_raw().cast()
        } else {
            export.into_versioned()?.into_raw().cast()
        };
        // SAFETY: the caller's promise.
        unsafe { tensor.write(pointer.as_ptr()) };
        Ok(())
    })
}

/// The bytes of a tensor, counted from its first byte.
fn pattern(length: ByteCount, lead: u64) -> Vec<u8> {
    let seven = |at: u64| at.wrapping_sub(lead).wrapping_mul(7).wrapping_add(3);
    (0..length.get()).map(|at| seven(at).to_le_bytes()[0]).collect()
}

fn fill_host(region: &Region, lead: u64) {
    let Location::Host(address) = region.location() else { return };
    let bytes = pattern(region.length(), lead);
    // SAFETY: the memory was allocated above, with that many bytes.
    unsafe { address.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
}

fn fill_device(context: &Context, region: &Region) -> Result<(), BoxedCause> {
    let host = counted(&SystemAllocator::new(SystemOptions::default()), region.length())?;
    fill_host(&host, LEAD);
    let stream = Stream::new(context)?;
    // SAFETY: both were allocated above, and live until the stream has been waited for.
    unsafe { stream.copy(host.location(), region.location(), region.length()) }?;
    Ok(stream.synchronize()?)
}

/// An imported tensor.
pub struct Import {
    pub(crate) tensor: ImportedTensor,
    _entry: LiveCount,
}

/// The properties of an imported tensor.
#[repr(C)]
pub struct TensorFacts {
    address: u64,
    bytes: u64,
    elements: u64,
    axes: u64,
    code: u8,
    bits: u8,
    lanes: u16,
    device_type: u32,
    device_id: i32,
    is_read_only: u32,
    is_copied: u32,
    is_dense: u32,
}

/// An importer of host tensors, and of a device's tensors if `device` is its number. An error about
/// the device is returned separately, so that the import takes ownership of the tensor first.
pub(crate) fn importer(device: i32) -> (Importer, Result<(), BoxedCause>) {
    match u32::try_from(device).map(|device| Context::primary(DeviceId::new(device))) {
        Ok(Ok(context)) => (Importer::new().with_device(context), Ok(())),
        Ok(Err(error)) => (Importer::new(), Err(error.into())),
        Err(_) => (Importer::new(), Ok(())),
    }
}

/// Imports a tensor. It takes ownership of the tensor even if the import fails.
///
/// # Safety
///
/// The pointer is DLPack's, to a versioned or a legacy structure that the caller owns. `import` may
/// be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_import(
    tensor: *mut c_void,
    is_legacy: i32,
    device: i32,
    import: *mut *mut Import,
) -> i32 {
    answer(|| {
        let (importer, found) = importer(device);
        let taken = if is_legacy == 0 {
            // SAFETY: the caller's promise.
            unsafe { importer.versioned(tensor.cast()) }
        } else {
            // SAFETY: the caller's promise.
            unsafe { importer.legacy(tensor.cast()) }
        };
        found?;
        let taken = Import { tensor: taken?, _entry: LiveCount::new(Resource::Imports) };
        // SAFETY: the caller's promise.
        unsafe { import.write(Box::into_raw(Box::new(taken))) };
        Ok(())
    })
}

/// Writes the properties of a tensor.
///
/// # Safety
///
/// `import` came from [`terrane_proof_import`]; `facts` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_facts(
    import: *const Import,
    facts: *mut TensorFacts,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let tensor = unsafe { &(*import).tensor };
        let (shape, element) = (tensor.shape(), tensor.shape().element());
        let address = match tensor.location() {
            Location::Host(address) => address.get(),
            Location::Device { address, .. } => address.get(),
            other => return Err(format!("a tensor at {other}").into()),
        };
        let (device_type, device_id) = tensor.device().to_pair();
        let found = TensorFacts {
            address,
            bytes: shape.bytes().get(),
            elements: shape.elements(),
            axes: to_u64(shape.sizes().len()),
            code: element.code().number(),
            bits: element.bits(),
            lanes: element.lanes(),
            device_type,
            device_id,
            is_read_only: tensor.is_read_only().into(),
            is_copied: tensor.is_copied().into(),
            is_dense: shape.is_dense().into(),
        };
        // SAFETY: the caller's promise.
        unsafe { facts.write(found) };
        Ok(())
    })
}

/// Reverses the bytes of a host tensor in place, as memory.
///
/// # Safety
///
/// `import` came from [`terrane_proof_import`], and no code uses the tensor during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_reverse(import: *const Import) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let memory = unsafe { &(*import).tensor }.memory()?;
        let Location::Host(address) = memory.location() else {
            return Err("the bytes are not in host memory".into());
        };
        let length = memory.length().to_usize();
        // SAFETY: it is writable memory, and no other code uses it during the call.
        unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), length) }.reverse();
        Ok(())
    })
}

/// Drops a tensor, on another thread if requested.
///
/// # Safety
///
/// `import` came from [`terrane_proof_import`], and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_release(import: *mut Import, elsewhere: i32) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        drop_value(unsafe { Box::from_raw(import) }, elsewhere != 0)
    })
}

/// Succeeds if there is a device. Otherwise the error has the reason.
// SAFETY: no other symbol has this name.
#[unsafe(no_mangle)]
pub extern "C" fn terrane_proof_probe() -> i32 {
    answer(|| {
        terrane_cuda::probe()?;
        Ok(())
    })
}

/// Makes the stream that a consumer names (`stream`, if `is_stated`) wait for completed work, as
/// `__dlpack__` requires. Refuses the numbers that the standard refuses.
///
/// # Safety
///
/// A number above 2 is a live stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_handshake(device: i32, stream: i64, is_stated: i32) -> i32 {
    answer(|| {
        let stream = (is_stated != 0).then_some(stream);
        let Ok(device) = u32::try_from(device).map(DeviceId::new) else {
            ConsumerStream::from_python(TensorDevice::Host, stream)?;
            return Ok(());
        };
        let consumer = ConsumerStream::from_python(TensorDevice::Cuda(device), stream)?;
        let context = Context::primary(device)?;
        // SAFETY: the caller's promise about the stream.
        unsafe { handshake(&context, ProducerStream::Complete, consumer) }?;
        Ok(())
    })
}
