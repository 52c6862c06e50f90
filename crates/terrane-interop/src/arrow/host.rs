//! Arrays of arrow-rs, in and out, without a copy.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use arrow_buffer::{BooleanBuffer, Buffer, MutableBuffer, NullBuffer};
use arrow_data::ffi::FFI_ArrowArray;
use arrow_data::{ArrayData, ArrayDataBuilder};
use arrow_schema::DataType;
use terrane_core::{ByteCount, Location, Memory, Region, StorageKind};

use super::abi::{ArrowArray, Owned};
use super::error::{ExportError, ImportError};
use super::import::import_array;
use crate::columns::handed_out::HandedOut;
use crate::columns::{Column, ColumnBuffer, ColumnError};

/// An array of arrow-rs as a column, over the same buffers, which it keeps alive.
///
/// `array` is what [`Array::to_data`](https://docs.rs/arrow-array/60/arrow_array/trait.Array.html)
/// gives; a record batch is its struct array. Only a validity bitmap that begins at another bit than
/// the values do is copied, as the C interface has one offset for both.
///
/// # Errors
///
/// [`ImportError::Misaligned`] where values are aligned to less than Arrow asks for.
pub fn from_arrow(array: &ArrayData) -> Result<Column, ImportError> {
    let structure = std::mem::ManuallyDrop::new(FFI_ArrowArray::new(array));
    let ours: *const ArrowArray = (&raw const *structure).cast();
    // SAFETY: the same fields in the same order (a test compares them), and what was read is not
    // dropped.
    let structure = unsafe { ours.read() };
    // SAFETY: arrow-rs's callback may be called once, wherever the structure is and on any thread
    // (`FFI_ArrowArray` is `Send`); only this value calls it.
    let structure = unsafe { Owned::new(structure) };
    // SAFETY: arrow-rs made it of a valid array, whose buffers nobody writes as long as it lives.
    unsafe { import_array(array.data_type(), structure) }
}

/// A column of host memory as an array of arrow-rs, over the same memory, which it keeps alive.
///
/// All values are checked, as far as the type has rules for them: offsets, UTF-8, keys of
/// dictionaries. `arrow_array::make_array` makes an array of the answer.
///
/// # Errors
///
/// [`ExportError::NotHost`] for memory that the processor does not reach, [`ExportError::Arrow`]
/// for values that break the rules of their type, or memory that is aligned to less than arrow-rs
/// asks for.
///
/// # Safety
///
/// Nobody writes the column's memory for as long as the array, or what is made of it, lives.
pub unsafe fn to_arrow(column: &Column) -> Result<ArrayData, ExportError> {
    if let Some(kind) = column.kind().filter(|kind| !kind.is_host()) {
        return Err(ExportError::NotHost { kind });
    }
    let data = unchecked(column)?;
    data.validate_full()?;
    Ok(data)
}

/// The array, whose values have not been looked at.
fn unchecked(column: &Column) -> Result<ArrayData, ExportError> {
    let data_type = column.data_type();
    let size = |rows: u64| ByteCount::new(rows).to_usize();
    let (length, offset) = (size(column.len()), size(column.offset()));
    let mut buffers = column.buffers();
    let mut builder = ArrayDataBuilder::new(data_type.clone()).len(length).offset(offset);
    if has_validity(data_type)
        && let [validity, rest @ ..] = buffers
    {
        buffers = rest;
        if let Some(validity) = validity {
            let bits = BooleanBuffer::new(buffer(validity)?, offset, length);
            builder = builder.nulls(Some(NullBuffer::new(bits)));
        }
    }
    if matches!(data_type, DataType::Utf8View | DataType::BinaryView)
        && let [rest @ .., _sizes] = buffers
    {
        buffers = rest;
    }
    for part in buffers {
        // An empty one may be left out.
        builder = builder.add_buffer(match part {
            Some(part) => buffer(part)?,
            // A first offset of zero, where it is offsets.
            None => MutableBuffer::from_len_zeroed(16).into(),
        });
    }
    for child in column.children().iter().chain(column.dictionary()) {
        builder = builder.add_child_data(unchecked(child)?);
    }
    // SAFETY: the sizes of all buffers have been checked against the type, and `to_arrow` has the
    // values checked before it hands the array out.
    Ok(unsafe { builder.build_unchecked() })
}

const fn has_validity(data_type: &DataType) -> bool {
    use DataType as T;
    !matches!(data_type, T::Null | T::Union(..) | T::RunEndEncoded(..))
}

fn buffer(part: &ColumnBuffer) -> Result<Buffer, ExportError> {
    let region: &Region = part.inner();
    let kind: StorageKind = region.kind();
    let Location::Host(address) = region.location() else {
        return Err(ExportError::NotHost { kind });
    };
    let Some(pointer) = std::ptr::NonNull::new(address.as_ptr()) else {
        return Err(ColumnError::NotHost { kind }.into());
    };
    // The region keeps what the entry before it stands for.
    let owner = Arc::new(AssertUnwindSafe((HandedOut::of([part]), region.clone())));
    // SAFETY: the region keeps the bytes, which are initialised host memory, and nobody writes them,
    // as whoever asked for the array promised.
    Ok(unsafe { Buffer::from_custom_allocation(pointer, region.length().to_usize(), owner) })
}
