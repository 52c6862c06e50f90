//! `swap_blocks` for candle's tensors, with the arguments that candle-vllm passes.
//!
//! It replaces `attention_rs::cache::swap_blocks(&Tensor, &Tensor, &HashMap<usize, usize>)`, which
//! candle-vllm calls for keys and values of each layer.

use std::collections::HashMap;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, OnceLock, PoisonError};

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use terrane::core::{HostAddress, Location};
use terrane::interop::tensors::{StridedError, StridedTensor};
use terrane::prelude::*;

use crate::block_copy::{SwapError, copy_blocks};

/// Copies blocks of `src` to blocks of `dst`, and returns when they are there. Each key of
/// `block_mapping` is a block of `src`, and its value a block of `dst`. Blocks are counted by the
/// first dimension.
///
/// # Errors
///
/// A [`SwapError`], as an error of candle.
pub fn swap_blocks(
    src: &Tensor,
    dst: &Tensor,
    block_mapping: &HashMap<usize, usize>,
) -> candle_core::Result<()> {
    static MANAGER: OnceLock<TransferManager> = OnceLock::new();
    let manager = match MANAGER.get() {
        Some(manager) => manager,
        None => {
            let new = TransferManager::with_default_engines();
            let new = new.map_err(candle_core::Error::wrap)?;
            MANAGER.get_or_init(|| new)
        }
    };
    swap_blocks_with(manager, src, dst, block_mapping).map_err(candle_core::Error::wrap)
}

/// Like [`swap_blocks`], with a manager of the caller and a typed error.
///
/// Both storages are locked until the copy has ended. So no other operation of candle sees half of a
/// block, and swaps of one tensor run one after the other.
///
/// # Errors
///
/// [`SwapError`]. If the copy failed half-way, blocks of the destination may be written in part.
pub fn swap_blocks_with(
    manager: &TransferManager,
    src: &Tensor,
    dst: &Tensor,
    block_mapping: &HashMap<usize, usize>,
) -> Result<(), SwapError> {
    if src.dtype() != dst.dtype() {
        return Err(SwapError::Types { from: src.dtype().as_str(), to: dst.dtype().as_str() });
    }
    let (source, destination) = (storage_address(src), storage_address(dst));
    let request = Request {
        manager,
        src,
        dst,
        mapping: block_mapping,
        is_same: source == destination,
        is_source_first: source < destination,
    };
    request.call(if request.is_source_first { src } else { dst }, None)
}

/// Starts a copy, and returns a completion to wait for, to poll or to await. The copy keeps both
/// tensors until it has ended.
///
/// # Errors
///
/// [`SwapError`]; nothing has been copied.
///
/// # Safety
///
/// Until the copy has ended, no other code writes these blocks of `src`, and no other code reads or
/// writes these blocks of `dst`.
pub unsafe fn start_swap_blocks(
    manager: &TransferManager,
    src: &Tensor,
    dst: &Tensor,
    block_mapping: &HashMap<usize, usize>,
) -> Result<Completion<()>, SwapError> {
    if src.dtype() != dst.dtype() {
        return Err(SwapError::Types { from: src.dtype().as_str(), to: dst.dtype().as_str() });
    }
    // SAFETY: this function's caller promises what both tensors need.
    let (from, after_source) = unsafe { adopted(src) }?;
    // SAFETY: as above.
    let (to, after_destination) = unsafe { adopted(dst) }?;
    copy_blocks(manager, &from, &to, block_mapping, after_destination.or(after_source))
}

/// A tensor as Terrane sees it, and on a device the work that its copies run after. The tensor is
/// the owner of the bytes.
///
/// # Errors
///
/// [`SwapError::Unsupported`] and [`SwapError::Tensor`].
///
/// # Safety
///
/// The caller synchronises every use of the tensor's bytes with the transfers of the value.
pub unsafe fn adopted(tensor: &Tensor) -> Result<(StridedTensor, Option<DeviceOrder>), SwapError> {
    let find = Find(Mutex::new(None));
    tensor.inplace_op1(&find).map_err(|error| SwapError::Library(error.into()))?;
    let found = find.0.into_inner().unwrap_or_else(PoisonError::into_inner);
    let place = found.ok_or_else(|| unsupported(tensor))?;
    // SAFETY: the place is that of the storage, and the caller promises the rest.
    let strided = unsafe { strided(&place, tensor) }?;
    Ok((strided, place.order))
}

/// The first byte of a storage.
struct Place {
    kind: StorageKind,
    location: Location,
    /// On a device, the work that a copy runs after.
    order: Option<DeviceOrder>,
}

/// The arguments of a swap.
#[derive(Clone, Copy)]
struct Request<'a> {
    manager: &'a TransferManager,
    src: &'a Tensor,
    dst: &'a Tensor,
    mapping: &'a HashMap<usize, usize>,
    /// Whether both tensors are views of one storage.
    is_same: bool,
    /// Whether the source is locked before the destination. The order follows from the addresses of
    /// the storages, so two threads that swap in opposite directions do not wait for each other.
    is_source_first: bool,
}

impl Request<'_> {
    /// Locks the storage of a tensor, and goes on with its place. `first` is the place of the other
    /// storage, if that one is locked.
    fn call(self, tensor: &Tensor, first: Option<Place>) -> Result<(), SwapError> {
        let swap = Swap { request: self, first, result: Mutex::new(None) };
        let called = tensor.inplace_op1(&swap);
        match (swap.result.into_inner().unwrap_or_else(PoisonError::into_inner), called) {
            (Some(result), _) => result,
            (None, Err(error)) => Err(SwapError::Library(error.into())),
            (None, Ok(())) => Err(unsupported(tensor)),
        }
    }
}

/// An operation that candle calls with the storage of a tensor, under its write lock.
struct Swap<'a> {
    request: Request<'a>,
    first: Option<Place>,
    result: Mutex<Option<Result<(), SwapError>>>,
}

impl Swap<'_> {
    /// Locks the other storage, or copies the blocks if both are locked.
    fn run(&self, place: Option<Place>) -> Result<(), SwapError> {
        let request = self.request;
        let Request { src, dst, is_source_first, .. } = request;
        let is_source = is_source_first == self.first.is_none();
        let place = place.ok_or_else(|| unsupported(if is_source { src } else { dst }))?;
        let (read, written) = match &self.first {
            None if request.is_same => (&place, &place),
            None => {
                let second = if is_source_first { dst } else { src };
                return request.call(second, Some(place));
            }
            Some(first) if is_source_first => (first, &place),
            Some(first) => (&place, first),
        };
        let order = written.order.clone().or_else(|| read.order.clone());
        // SAFETY: both storages are locked for writing until this function returns, which is after
        // the copy.
        let from = unsafe { strided(read, src) }?;
        // SAFETY: as above.
        let to = unsafe { strided(written, dst) }?;
        copy_blocks(request.manager, &from, &to, request.mapping, order)?.wait().result?;
        Ok(())
    }
}

impl InplaceOp1 for Swap<'_> {
    fn name(&self) -> &'static str {
        "swap blocks"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        let result = self.run(on_host(storage));
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        Ok(())
    }
}

/// An operation that finds the place of a storage.
struct Find(Mutex<Option<Place>>);

impl InplaceOp1 for Find {
    fn name(&self) -> &'static str {
        "place of the storage"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = on_host(storage);
        Ok(())
    }
}

/// The tensor whose storage begins at a place.
///
/// # Safety
///
/// The place is that of the tensor's storage. The caller synchronises every use of the bytes with the
/// transfers of the value.
unsafe fn strided(place: &Place, tensor: &Tensor) -> Result<StridedTensor, SwapError> {
    let element = tensor.dtype().size_in_bytes();
    let too_large = || StridedError::TooLarge { dimension: 0 };
    let offset = tensor.layout().start_offset().checked_mul(element).ok_or_else(too_large)?;
    let first = place.location.checked_add(ByteCount::from_usize(offset));
    let at = (place.kind, first.ok_or_else(too_large)?);
    let element = u32::try_from(element).map_err(|_| too_large())?;
    let (sizes, strides) = (tensor.dims().iter().copied(), tensor.stride().iter().copied());
    // SAFETY: candle initialises its storage, and neither moves nor frees it while the clone lives.
    // The caller promises the rest.
    Ok(unsafe { StridedTensor::from_raw(at, element, sizes, strides, tensor.clone()) }?)
}

/// The place of a storage on the host. `None` for elements of less than a byte.
fn on_host(storage: &mut CpuStorage) -> Option<Place> {
    fn first<T>(elements: &mut [T]) -> NonNull<u8> {
        NonNull::from(elements).cast()
    }
    let start = match storage {
        CpuStorage::U8(all) => first(all),
        CpuStorage::U32(all) => first(all),
        CpuStorage::I16(all) => first(all),
        CpuStorage::I32(all) => first(all),
        CpuStorage::I64(all) => first(all),
        CpuStorage::BF16(all) => first(all),
        CpuStorage::F16(all) => first(all),
        CpuStorage::F32(all) => first(all),
        CpuStorage::F64(all) => first(all),
        CpuStorage::F8E4M3(all) => first(all),
        _ => return None,
    };
    let location = Location::Host(HostAddress::new(start));
    Some(Place { kind: StorageKind::System, location, order: None })
}

fn storage_address(tensor: &Tensor) -> *const Storage {
    ptr::from_ref(&*tensor.storage_and_layout().0)
}

fn unsupported(tensor: &Tensor) -> SwapError {
    let (dtype, device) = (tensor.dtype().as_str(), tensor.device());
    SwapError::Unsupported { what: format!("a tensor of {dtype} on {device:?}") }
}
