//! Columns from tensors, and tensors from columns.

use arrow_schema::{DataType, Field};
use terrane_core::{ByteCount, ForeignMemory, Region};

use super::exported_memory::{self, ExportedMemory};
use super::{Column, ColumnBuffer, ColumnError, ColumnParts, Origin, shape};
use terrane_interop::dlpack::{ElementType, ImportedTensor, TensorExport, TensorShape, TypeCode};

impl Column {
    /// Creates a column over the memory of a tensor of another library, with a row for each
    /// position of the first axis. Further axes become lists of fixed size. A tensor without axes
    /// is one row.
    ///
    /// Elements without an Arrow type (bfloat16, FP8, complex numbers, vectors) become binary data
    /// of their width. For a tensor over memory that Terrane exported, the column is over that
    /// memory and read-only: the tensor is released, and other users of the memory are unknown. For
    /// other tensors, the column is writable if the tensor is.
    ///
    /// # Errors
    ///
    /// [`ColumnError::Tensor`] if the elements are not adjacent with the last axis fastest, or are
    /// not whole bytes. Also for Booleans, because Arrow packs them into bits.
    pub fn from_tensor(tensor: &ImportedTensor) -> Result<Self, ColumnError> {
        let element = tensor.shape().element();
        let refused = |reason| ColumnError::Tensor { element, reason };
        let sizes = tensor.shape().sizes().iter().map(|size| u64::try_from(*size));
        let sizes = sizes.collect::<Result<Vec<_>, _>>();
        let sizes = sizes.map_err(|_| refused("has an axis of a negative size"))?;
        let compact = TensorShape::compact(element, &sizes);
        let is_compact = compact.is_ok_and(|compact| compact.bytes() == tensor.span().length)
            && tensor.shape().is_dense()
            && is_row_major(&sizes, tensor.shape().strides());
        if !is_compact {
            return Err(refused("has gaps, or its last axis is not the fastest"));
        }
        let value = match element.code() {
            TypeCode::Bool => {
                return Err(refused("has a byte for each truth value, and Arrow has a bit"));
            }
            _ => value_type(element)
                .ok_or_else(|| refused("has elements that are not whole bytes"))?,
        };
        let values = match (exported_memory::find(tensor.span()), tensor.memory()) {
            (Some(ours), _) => ours,
            (None, Ok(memory)) => ColumnBuffer::foreign(Region::new(memory), Origin::DlPack),
            (None, Err(_)) => {
                // SAFETY: the tensor was imported with the promise that its elements exist until it
                // is released, and it is the owner. It has no gaps. No code writes the elements,
                // because the buffer is read-only.
                let memory = unsafe { ForeignMemory::new(tensor.span(), tensor.clone()) };
                ColumnBuffer::foreign(Region::new(memory), Origin::DlPack).as_read_only()
            }
        };
        let inner = sizes.get(1..).unwrap_or_default();
        rows(value, sizes.first().copied().unwrap_or(1), inner, values)
    }

    /// Exports the values as a tensor of one axis, which keeps the memory alive until its consumer
    /// has finished. The memory is recognised when it is imported again, from any library and with
    /// any interface.
    ///
    /// # Errors
    ///
    /// [`ColumnError::NoTensor`] for types other than integers and floating-point numbers, and for
    /// columns with a validity bitmap. [`ColumnError::Export`].
    ///
    /// # Safety
    ///
    /// As for [`TensorExport::new`], while the tensor, or anything derived from it, is used. The
    /// tensor of a read-only column is read-only.
    pub unsafe fn to_tensor(&self) -> Result<TensorExport, ColumnError> {
        let refused = || ColumnError::NoTensor { data_type: self.data_type().clone() };
        let element = element_type(self.data_type()).ok_or_else(refused)?;
        let (width, _) = shape::width(self.data_type()).ok_or_else(refused)?;
        let [validity, Some(values)] = self.buffers() else { return Err(refused()) };
        if validity.is_some() && self.null_count() != Some(0) {
            return Err(refused());
        }
        let skipped = ByteCount::product(&[("offset", self.offset()), ("width", width)])?;
        let bytes = ByteCount::product(&[("rows", self.len()), ("width", width)])?;
        let region = values.inner().view(skipped, bytes)?;
        let shape = TensorShape::compact(element, &[self.len()]).map_err(|_| refused())?;
        // SAFETY: the caller's promise.
        let export = unsafe { TensorExport::new(region, shape) }?;
        let export = if values.is_read_only() { export.read_only() } else { export };
        // The column keeps alive the memory that the entry describes.
        Ok(export.guarded_by((ExportedMemory::new(self), self.clone())))
    }
}

/// `length` rows of lists of these sizes, with adjacent values.
fn rows(
    value: DataType,
    length: u64,
    sizes: &[u64],
    values: ColumnBuffer,
) -> Result<Column, ColumnError> {
    let leaf = |data_type, length, values| ColumnParts {
        data_type,
        length,
        offset: 0,
        null_count: Some(0),
        buffers: vec![None, Some(values)],
        children: vec![],
        dictionary: None,
    };
    let Some((size, inner)) = sizes.split_first() else {
        return Column::from_parts(leaf(value, length, values));
    };
    let below = ByteCount::product(&[("rows", length), ("values in each", *size)])?.get();
    let child = rows(value, below, inner, values)?;
    let width = i32::try_from(*size).map_err(|_| ColumnError::WideRow { values: *size })?;
    let item = Field::new("item", child.data_type().clone(), false);
    let parts = ColumnParts {
        data_type: DataType::FixedSizeList(item.into(), width),
        length,
        offset: 0,
        null_count: Some(0),
        buffers: vec![None],
        children: vec![child],
        dictionary: None,
    };
    Column::from_parts(parts)
}

/// Whether the last axis is the fastest, without gaps between elements. Axes of one element, and
/// empty tensors, may have any strides.
fn is_row_major(sizes: &[u64], strides: &[i64]) -> bool {
    let mut expected = Some(1_u64);
    sizes.contains(&0)
        || sizes.iter().zip(strides).rev().all(|(size, stride)| {
            let fits = *size == 1 || u64::try_from(*stride).ok() == expected;
            expected = expected.and_then(|expected| expected.checked_mul(*size));
            fits
        })
}

/// The numbers that both DLPack and Arrow have.
const NUMBERS: [(TypeCode, u8, DataType); 11] = [
    (TypeCode::Int, 8, DataType::Int8),
    (TypeCode::Int, 16, DataType::Int16),
    (TypeCode::Int, 32, DataType::Int32),
    (TypeCode::Int, 64, DataType::Int64),
    (TypeCode::UInt, 8, DataType::UInt8),
    (TypeCode::UInt, 16, DataType::UInt16),
    (TypeCode::UInt, 32, DataType::UInt32),
    (TypeCode::UInt, 64, DataType::UInt64),
    (TypeCode::Float, 16, DataType::Float16),
    (TypeCode::Float, 32, DataType::Float32),
    (TypeCode::Float, 64, DataType::Float64),
];

/// The type of a tensor's elements; `None` if they are not whole bytes.
fn value_type(element: ElementType) -> Option<DataType> {
    let width = element.width()?;
    let searched = (element.code(), element.bits());
    let number = NUMBERS.into_iter().find(|&(code, bits, _)| (code, bits) == searched);
    match number {
        Some((_, _, data_type)) if element.lanes() == 1 => Some(data_type),
        _ => Some(DataType::FixedSizeBinary(i32::try_from(width.get()).ok()?)),
    }
}

/// The element type of a column's values.
fn element_type(data_type: &DataType) -> Option<ElementType> {
    let (code, bits, _) = NUMBERS.into_iter().find(|(.., known)| known == data_type)?;
    ElementType::new(code, bits, 1).ok()
}
