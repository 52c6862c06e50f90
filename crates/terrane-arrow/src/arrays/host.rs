//! Imports and exports arrays of arrow-rs without a copy.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use arrow_buffer::{BooleanBuffer, Buffer, MutableBuffer, NullBuffer};
use arrow_data::ffi::FFI_ArrowArray;
use arrow_data::{ArrayData, ArrayDataBuilder};
use arrow_schema::ArrowError;
use terrane_core::{ByteCount, Location, Memory};

use super::abi::{ArrowArray, Owned};
use super::error::{ExportError, ImportError};
use super::import::import_array;
use super::schema::check_type;
use crate::columns::exported_memory::ExportedMemory;
use crate::columns::shape::{self, Extent};
use crate::columns::{Column, ColumnBuffer, ColumnError};

/// Creates a column over the buffers of an arrow-rs array, and keeps the array alive.
///
/// `array` comes from
/// [`Array::to_data`](https://docs.rs/arrow-array/60/arrow_array/trait.Array.html); for a record
/// batch, from its struct array. If a validity bitmap begins at another bit than the values, it is
/// copied, because the C interface has one offset for both. Nothing else is copied.
///
/// # Errors
///
/// [`ImportError::Misaligned`] if the alignment of values is below Arrow's requirement.
pub fn from_arrow(array: &ArrayData) -> Result<Column, ImportError> {
    check_type(array.data_type())?;
    let structure = std::mem::ManuallyDrop::new(FFI_ArrowArray::new(array));
    let ours: *const ArrowArray = (&raw const *structure).cast();
    // SAFETY: both types have the same fields in the same order (checked by a test), and the source
    // is not dropped.
    let structure = unsafe { ours.read() };
    // SAFETY: arrow-rs's callback may be called once, after any move and on any thread
    // (`FFI_ArrowArray` is `Send`). Only this value calls it.
    let structure = unsafe { Owned::new(structure) };
    // SAFETY: arrow-rs created it from a valid array, whose buffers no code writes while it lives.
    unsafe { import_array(array.data_type(), structure) }
}

/// Creates an arrow-rs array over the host memory of a column, and keeps the column alive.
///
/// All values are checked against the rules of their type: offsets, UTF-8, keys of dictionaries.
/// `arrow_array::make_array` accepts the result.
///
/// # Errors
///
/// [`ExportError::NotHost`] for memory that the processor cannot access. [`ExportError::Arrow`] for
/// values that break the rules of their type, and for memory whose alignment is below arrow-rs's
/// requirement.
///
/// # Safety
///
/// No code may write the column's memory while the array, or anything derived from it, lives.
pub unsafe fn to_arrow(column: &Column) -> Result<ArrayData, ExportError> {
    if let Some(kind) = column.kind().filter(|kind| !kind.is_host()) {
        return Err(ExportError::NotHost { kind });
    }
    let data = unchecked(column)?;
    data.validate()?;
    check_values(&data)?;
    Ok(data)
}

/// Checks the values of an array and of its descendants, like [`ArrayData::validate_full`].
///
/// That function repeats each bit of a list's validity for each value, even without nulls. A list
/// can have 2^31 values that occupy no memory.
fn check_values(data: &ArrayData) -> Result<(), ArrowError> {
    if data.child_data().iter().any(|child| child.nulls().is_some()) {
        data.validate_nulls()?;
    }
    data.validate_values()?;
    data.child_data().iter().try_for_each(check_values)
}

/// The array, with unchecked values.
fn unchecked(column: &Column) -> Result<ArrayData, ExportError> {
    let data_type = column.data_type();
    let size = |number: u64| ByteCount::new(number).to_usize();
    let (length, offset) = (size(column.len()), size(column.offset()));
    let mut builder = ArrayDataBuilder::new(data_type.clone()).len(length).offset(offset);
    let rows = ByteCount::new(column.offset()).checked_add(ByteCount::new(column.len()));
    let rows = rows.map_err(ColumnError::from)?.get();
    let shapes = shape::buffers(data_type, rows, column.buffers().len());
    let shapes = shapes.map_err(ColumnError::from)?;
    for (shape, part) in shapes.iter().zip(column.buffers()) {
        // Only the needed bytes, because arrow-rs reads a whole buffer of offsets as numbers.
        let bytes = match (shape.extent, part) {
            // arrow-rs creates this buffer when it needs it.
            (Extent::Sizes(_), _) => continue,
            (Extent::Exact(bytes), _) => bytes,
            (Extent::ByOffsets | Extent::Listed, part) => {
                part.as_ref().map_or(ByteCount::ZERO, ColumnBuffer::length)
            }
        };
        match part {
            None if shape.optional => {}
            Some(part) if shape.optional => {
                let bits = BooleanBuffer::new(buffer(part, bytes)?, offset, length);
                builder = builder.nulls(Some(NullBuffer::new(bits)));
            }
            // An empty buffer may have any address, even a misaligned one. But arrow-rs compares
            // arrays by their first offset, even without rows.
            _ if bytes.is_zero() => {
                let offset = match (shape.name, shape::offset_width(data_type)) {
                    ("offsets", Some(width)) => size(width),
                    _ => 0,
                };
                builder = builder.add_buffer(MutableBuffer::from_len_zeroed(offset).into());
            }
            Some(part) => builder = builder.add_buffer(buffer(part, bytes)?),
            None => {
                let data_type = data_type.clone();
                return Err(ColumnError::MissingBuffer { data_type, buffer: shape.name }.into());
            }
        }
    }
    for child in column.children().iter().chain(column.dictionary()) {
        builder = builder.add_child_data(unchecked(child)?);
    }
    // SAFETY: the sizes of all buffers have been checked against the type, and `to_arrow` checks
    // the values before it returns the array.
    Ok(unsafe { builder.build_unchecked() })
}

/// The first bytes of a buffer.
fn buffer(part: &ColumnBuffer, bytes: ByteCount) -> Result<Buffer, ExportError> {
    let region = part.inner().view(ByteCount::ZERO, bytes).map_err(ColumnError::from)?;
    let kind = region.kind();
    let Location::Host(address) = region.location() else {
        return Err(ExportError::NotHost { kind });
    };
    let Some(pointer) = std::ptr::NonNull::new(address.as_ptr()) else {
        return Err(ColumnError::NotHost { kind }.into());
    };
    // The region keeps alive the memory that the first field describes.
    let owner = Arc::new(AssertUnwindSafe((ExportedMemory::of([part]), region)));
    // SAFETY: the region keeps the bytes alive, which are initialised host memory. No code writes
    // them, as the caller of the export promised.
    Ok(unsafe { Buffer::from_custom_allocation(pointer, bytes.to_usize(), owner) })
}
