//! Plans the locations of the columns of a columnar buffer within one region, before any memory
//! exists.

use arrow_schema::{DataType, Field, SchemaRef};
use terrane_core::{
    Alignment, Allocate, ByteCount, Label, Limits, Memory, Region, RegionRequest, SizeOverflow,
};

use super::order::AccessOrder;
use super::shape::{self, ChildRows, Extent};
use super::{
    Column, ColumnBuffer, ColumnError, ColumnParts, ColumnarBuffer, Growth, RowCountWidth, types,
};

/// The options of a columnar buffer, besides its schema and capacity.
#[derive(Clone, Debug)]
pub struct ColumnarOptions {
    /// The width of the row count on the device.
    pub row_count: RowCountWidth,
    /// The alignment of each buffer of a column: 64 bytes, as Arrow recommends.
    pub alignment: Alignment,
    /// The bytes of text or binary data to reserve for each row of such a column.
    pub variable_bytes_per_row: ByteCount,
    /// The growth policy.
    pub growth: Growth,
    /// The purpose of the memory, for errors, traces and snapshots.
    pub label: Label,
}

impl Default for ColumnarOptions {
    fn default() -> Self {
        Self {
            row_count: RowCountWidth::default(),
            alignment: Alignment::of(64),
            variable_bytes_per_row: ByteCount::new(32),
            growth: Growth::default(),
            label: Label::from("columns"),
        }
    }
}

/// The plan of a columnar buffer for a schema and a capacity: its size, and the location of each
/// buffer of each column.
///
/// All buffers are in one region: the row count first, then the columns in the order of the schema.
/// The validity bitmap of a nullable column precedes its values.
///
/// ```
/// use std::sync::Arc;
/// use arrow_schema::{DataType, Field, Schema};
/// use terrane_core::ByteCount;
/// use terrane_arrow::columns::{ColumnarOptions, ColumnarPlan, HostOrder};
/// use terrane_storage::{SystemAllocator, SystemOptions};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let schema = Schema::new(vec![
///     Field::new("token", DataType::UInt32, false),
///     Field::new("score", DataType::Float32, true),
/// ]);
/// let plan = ColumnarPlan::new(Arc::new(schema), 1000, ColumnarOptions::default())?;
/// // The count, the tokens, a bit for each score, the scores; each from a multiple of 64 on.
/// assert_eq!(plan.size(), ByteCount::new(64 + 4032 + 128 + 4000));
///
/// let memory = SystemAllocator::new(SystemOptions::default());
/// let buffer = plan.allocate(&memory, &HostOrder)?;
/// assert_eq!(buffer.rows()?, 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ColumnarPlan {
    schema: SchemaRef,
    capacity: u64,
    options: ColumnarOptions,
    /// The buffers of all columns, depth first.
    buffers: Vec<Option<Placed>>,
    size: ByteCount,
}

/// The location of a buffer within the region.
#[derive(Clone, Copy, Debug)]
struct Placed {
    offset: ByteCount,
    length: ByteCount,
}

impl ColumnarPlan {
    /// Plans a buffer with space for `capacity` rows.
    ///
    /// It supports types of fixed width, booleans, texts and binary data, and structs and lists of
    /// fixed size of these.
    ///
    /// # Errors
    ///
    /// [`ColumnError::Unsupported`] for other types, [`ColumnError::Overflow`], and errors for
    /// types that no column can have.
    pub fn new(
        schema: SchemaRef,
        capacity: u64,
        options: ColumnarOptions,
    ) -> Result<Self, ColumnError> {
        let mut plan = Self {
            schema: SchemaRef::clone(&schema),
            capacity,
            options,
            buffers: Vec::new(),
            // The row count, at its largest width.
            size: ByteCount::new(8),
        };
        types::check_rows(capacity)?;
        types::check(schema.fields().iter().map(|field| field.data_type()))?;
        for field in schema.fields() {
            plan.place(field, capacity)?;
        }
        Ok(plan)
    }

    /// The size to request from an allocator.
    #[must_use]
    pub const fn size(&self) -> ByteCount {
        self.size
    }

    /// The size that an allocator with these limits returns, rounded up to the granule.
    ///
    /// # Errors
    ///
    /// [`SizeOverflow`] if that does not fit in 64 bits.
    pub fn size_under(&self, limits: Limits) -> Result<ByteCount, SizeOverflow> {
        self.size.align_up(limits.granule)
    }

    /// The request to an allocator.
    #[must_use]
    pub fn request(&self) -> RegionRequest {
        RegionRequest::new(self.size)
            .aligned_to(self.options.alignment.max(EIGHT))
            .labelled(self.options.label.as_str().to_owned())
    }

    /// The number of rows that fit.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The schema.
    #[must_use]
    pub const fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// The options.
    #[must_use]
    pub const fn options(&self) -> &ColumnarOptions {
        &self.options
    }

    /// Allocates the buffer, with a row count of 0. The contents of the columns are undefined.
    ///
    /// # Errors
    ///
    /// [`ColumnError::Allocate`], and the errors of `order`.
    pub fn allocate<A: Allocate>(
        &self,
        allocator: &A,
        order: &dyn AccessOrder,
    ) -> Result<ColumnarBuffer, ColumnError> {
        let memory = Region::new(allocator.allocate(&self.request())?);
        // SAFETY: it was allocated for this call, and no other code uses it.
        unsafe { self.over(memory, order) }
    }

    /// Creates a buffer in existing memory, with a row count of 0.
    ///
    /// # Errors
    ///
    /// [`ColumnError::ShortMemory`], [`ColumnError::Misaligned`], and the errors of `order`.
    ///
    /// # Safety
    ///
    /// Until this returns, no other code uses the memory, except for earlier work in this order.
    pub unsafe fn over(
        &self,
        memory: Region,
        order: &dyn AccessOrder,
    ) -> Result<ColumnarBuffer, ColumnError> {
        let (needed, found) = (self.size, memory.length());
        if found < needed {
            return Err(ColumnError::ShortMemory { needed, found });
        }
        let (required, location) = (self.request().alignment, memory.location());
        if location.alignment() < required {
            return Err(ColumnError::Misaligned { buffer: "columns", location, required });
        }
        let mut placed = self.buffers.iter();
        let columns = self.schema.fields().iter();
        let columns = columns
            .map(|field| Self::column(field, self.capacity, &memory, &mut placed))
            .collect::<Result<Vec<_>, _>>()?;
        let width = self.options.row_count;
        let count = memory.view(ByteCount::ZERO, width.bytes())?;
        let schema = SchemaRef::clone(&self.schema);
        let mut buffer =
            ColumnarBuffer::from_columns(schema, columns, self.capacity, count, width)?
                .with_growth(self.options.growth);
        buffer.keep_plan(self.clone(), memory);
        // SAFETY: the caller's promise.
        unsafe { buffer.set_rows(0, order) }?;
        Ok(buffer)
    }

    /// Places the buffers of one column and of its descendants.
    fn place(&mut self, field: &Field, rows: u64) -> Result<(), ColumnError> {
        let data_type = field.data_type();
        if !is_supported(data_type) {
            let name = field.name().as_str().into();
            return Err(ColumnError::Unsupported { name, data_type: data_type.clone() });
        }
        for shape in shape::buffers(data_type, rows, 0)? {
            if shape.optional && !field.is_nullable() {
                self.buffers.push(None);
                continue;
            }
            let length = match shape.extent {
                Extent::Exact(bytes) => bytes,
                _ => self.options.variable_bytes_per_row.checked_mul("rows", rows)?,
            };
            let offset = self.size.align_up(self.options.alignment.max(EIGHT))?;
            self.size = offset.checked_add(length)?;
            self.buffers.push(Some(Placed { offset, length }));
        }
        shape::children(data_type, rows)?
            .into_iter()
            .try_for_each(|(field, needed)| self.place(field, at_least(needed)))
    }

    /// The column with the next buffers.
    fn column<'a>(
        field: &Field,
        rows: u64,
        memory: &Region,
        placed: &mut impl Iterator<Item = &'a Option<Placed>>,
    ) -> Result<Column, ColumnError> {
        let data_type = field.data_type();
        let mut buffers = Vec::new();
        for _ in shape::buffers(data_type, rows, 0)? {
            let view = |at: &Placed| memory.view(at.offset, at.length).map(ColumnBuffer::from);
            buffers.push(placed.next().and_then(Option::as_ref).map(view).transpose()?);
        }
        let children = shape::children(data_type, rows)?.into_iter();
        let children =
            children.map(|(field, needed)| Self::column(field, at_least(needed), memory, placed));
        let parts = ColumnParts {
            data_type: data_type.clone(),
            length: rows,
            offset: 0,
            null_count: if field.is_nullable() { None } else { Some(0) },
            children: children.collect::<Result<_, _>>()?,
            buffers,
            dictionary: None,
        };
        Column::from_parts(parts)
    }
}

/// The smallest alignment of a buffer: that of the widest values that Arrow aligns.
const EIGHT: Alignment = Alignment::of(8);

/// Whether the number of rows and the reserved bytes for each determine the sizes of the buffers.
fn is_supported(data_type: &DataType) -> bool {
    use DataType as T;
    let is_variable = matches!(data_type, T::Utf8 | T::LargeUtf8 | T::Binary | T::LargeBinary);
    let is_nested = matches!(data_type, T::Struct(_) | T::FixedSizeList(..));
    let is_plain = matches!(data_type, T::Boolean) || shape::width(data_type).is_some();
    is_plain || is_variable || is_nested
}

/// The number of values in a child of a supported type.
const fn at_least(needed: ChildRows) -> u64 {
    match needed {
        ChildRows::AtLeast(rows) => rows,
        ChildRows::ByOffsets | ChildRows::Unknown => 0,
    }
}
