//! A columnar buffer: columns with space for rows, and the row count on the device.

use arrow_schema::{DataType, Schema, SchemaRef};
use terrane_core::{Alignment, Allocate, ByteCount, Memory, Region, StorageKind};

use super::order::{AccessOrder, keep_if_in_use};
use super::plan::ColumnarPlan;
use super::{Column, ColumnError, ColumnParts, Growth};

/// The width of the row count that kernels write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowCountWidth {
    /// 32 bits.
    U32,
    /// 64 bits.
    #[default]
    U64,
}

impl RowCountWidth {
    /// The width in bytes.
    #[must_use]
    pub const fn bytes(self) -> ByteCount {
        match self {
            Self::U32 => ByteCount::new(4),
            Self::U64 => ByteCount::new(8),
        }
    }

    /// The largest row count.
    #[must_use]
    pub fn most(self) -> u64 {
        match self {
            Self::U32 => u64::from(u32::MAX),
            Self::U64 => u64::MAX,
        }
    }
}

/// The host's knowledge of a row count on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedRows {
    /// The number of rows when the count was last read or written. It has not changed since.
    Known(u64),
    /// The device may have changed it.
    Stale,
}

/// Columns with space for a number of rows, and the actual number of rows, which kernels write in
/// the order of a stream.
///
/// The host has a copy of the row count. It becomes [stale](CachedRows::Stale) when the submitter
/// of a kernel [marks it](Self::mark_stale), until it is [read again](Self::refresh) in the
/// kernel's order. Methods that need the number refuse a stale copy.
///
/// Create it with a [`ColumnarPlan`] over any allocator, or with
/// [`from_columns`](Self::from_columns) over existing columns.
#[derive(Debug)]
pub struct ColumnarBuffer {
    schema: SchemaRef,
    columns: Vec<Column>,
    capacity: u64,
    count: Region,
    width: RowCountWidth,
    cached: CachedRows,
    growth: Growth,
    /// The plan and the memory; `None` for existing columns.
    planned: Option<(ColumnarPlan, Region)>,
}

impl ColumnarBuffer {
    /// Creates a buffer of existing columns of any owner, with separate memory for the row count.
    /// The count is unknown until it is read.
    ///
    /// # Errors
    ///
    /// [`ColumnError`] if the columns do not match the schema, have no space for `capacity` rows,
    /// or are in different memories. Also if the memory of the row count is too short or
    /// misaligned.
    pub fn from_columns(
        schema: SchemaRef,
        columns: Vec<Column>,
        capacity: u64,
        count: Region,
        width: RowCountWidth,
    ) -> Result<Self, ColumnError> {
        let buffer = Self {
            schema,
            columns,
            capacity,
            count,
            width,
            cached: CachedRows::Stale,
            growth: Growth::Fixed,
            planned: None,
        };
        buffer.validate()?;
        Ok(buffer)
    }

    /// The same buffer with a growth policy.
    #[must_use]
    pub fn with_growth(self, growth: Growth) -> Self {
        Self { growth, ..self }
    }

    /// The schema.
    #[must_use]
    pub const fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// The number of rows that fit.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The columns, each with `capacity` rows.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The column with this name.
    #[must_use]
    pub fn column(&self, name: &str) -> Option<&Column> {
        let (index, _) = self.schema.column_with_name(name)?;
        self.columns.get(index)
    }

    /// The kind of memory.
    #[must_use]
    pub fn kind(&self) -> StorageKind {
        self.count.kind()
    }

    /// All of its memory, if a plan allocated it.
    #[must_use]
    pub fn memory(&self) -> Option<&Region> {
        self.planned.as_ref().map(|(_, memory)| memory)
    }

    /// The memory of the row count, for kernels that write it. Call
    /// [`mark_stale`](Self::mark_stale) when you submit such a kernel.
    #[must_use]
    pub const fn row_count(&self) -> &Region {
        &self.count
    }

    /// The width of the row count.
    #[must_use]
    pub const fn row_count_width(&self) -> RowCountWidth {
        self.width
    }

    /// The host's knowledge of the row count.
    #[must_use]
    pub const fn cached_rows(&self) -> CachedRows {
        self.cached
    }

    /// The number of rows.
    ///
    /// # Errors
    ///
    /// [`ColumnError::StaleRowCount`] if it is unknown.
    pub const fn rows(&self) -> Result<u64, ColumnError> {
        match self.cached {
            CachedRows::Known(rows) => Ok(rows),
            CachedRows::Stale => Err(ColumnError::StaleRowCount),
        }
    }

    /// Declares that the device may change the row count from now on. Call it when a kernel that
    /// writes the count is submitted.
    pub const fn mark_stale(&mut self) {
        self.cached = CachedRows::Stale;
    }

    /// Sets the cached number of rows, if the host knows it. This accesses no memory and waits for
    /// no stream. The count in memory does not change. If a kernel reads it, call
    /// [`set_rows`](Self::set_rows) first, or run a kernel that writes it.
    ///
    /// # Errors
    ///
    /// [`ColumnError::OverCapacity`] if the rows do not fit. The state does not change.
    pub fn state_rows(&mut self, rows: u64) -> Result<(), ColumnError> {
        self.check_rows(rows)?;
        self.cached = CachedRows::Known(rows);
        Ok(())
    }

    /// Reads the row count after the previous work in `order`, and returns it.
    ///
    /// # Errors
    ///
    /// [`ColumnError::OverCapacity`] if the device states more rows than fit; the count stays
    /// stale. The errors of `order`.
    ///
    /// # Safety
    ///
    /// All writers of the row count precede this call in `order`: they were submitted to this
    /// stream, or to a stream for which this stream waits.
    pub unsafe fn refresh(&mut self, order: &dyn AccessOrder) -> Result<u64, ColumnError> {
        self.cached = CachedRows::Stale;
        let mut bytes = [0; 8];
        let (read, _) = bytes.split_at_mut(self.width.bytes().to_usize());
        // SAFETY: the region is valid and has that width, and its writers precede this call in the
        // order.
        let count = unsafe { order.read(self.count.location(), read) };
        keep_if_in_use(count, self.count.clone())?;
        let [a, b, c, d, ..] = bytes;
        let rows = match self.width {
            RowCountWidth::U32 => u64::from(u32::from_ne_bytes([a, b, c, d])),
            RowCountWidth::U64 => u64::from_ne_bytes(bytes),
        };
        self.check_rows(rows)?;
        self.cached = CachedRows::Known(rows);
        Ok(rows)
    }

    /// Writes the row count after the previous work in `order`.
    ///
    /// # Errors
    ///
    /// [`ColumnError::OverCapacity`] if the rows do not fit; nothing is written. The errors of
    /// `order`, after which the row count is stale.
    ///
    /// # Safety
    ///
    /// No code uses the row count during the call, except for earlier work in this order.
    pub unsafe fn set_rows(
        &mut self,
        rows: u64,
        order: &dyn AccessOrder,
    ) -> Result<(), ColumnError> {
        self.check_rows(rows)?;
        self.cached = CachedRows::Stale;
        let location = self.count.location();
        let written = match (self.width, u32::try_from(rows)) {
            // SAFETY: the region is valid and has that width; the caller promised that no other
            // code uses it.
            (RowCountWidth::U32, Ok(rows)) => unsafe { order.write(&rows.to_ne_bytes(), location) },
            // SAFETY: as above. More rows than 32 bits can count were refused.
            _ => unsafe { order.write(&rows.to_ne_bytes(), location) },
        };
        keep_if_in_use(written, self.count.clone())?;
        self.cached = CachedRows::Known(rows);
        Ok(())
    }

    /// Checks that the columns match the schema, have space for the stated rows and are in one
    /// memory. A known row count must not exceed the capacity.
    ///
    /// # Errors
    ///
    /// [`ColumnError`] names the mismatch.
    pub fn validate(&self) -> Result<(), ColumnError> {
        let (expected, found) = (self.schema.fields().len(), self.columns.len());
        if expected != found {
            return Err(ColumnError::ColumnCount { expected, found });
        }
        for (field, column) in self.schema.fields().iter().zip(&self.columns) {
            let name = || field.name().as_str().into();
            if !field.data_type().equals_datatype(column.data_type()) {
                let (expected, found) = (field.data_type().clone(), column.data_type().clone());
                return Err(ColumnError::WrongType { name: name(), expected, found });
            }
            if column.len() < self.capacity {
                let (capacity, found) = (self.capacity, column.len());
                return Err(ColumnError::ShortColumn { name: name(), capacity, found });
            }
            if !field.is_nullable() && column.null_count() != Some(0) {
                return Err(ColumnError::UnexpectedNulls { name: name() });
            }
            let kind = column.kind().unwrap_or_else(|| self.kind());
            if kind != self.kind() {
                return Err(ColumnError::MixedMemory { first: self.kind(), second: kind });
            }
        }
        self.check_count()?;
        match self.cached {
            CachedRows::Known(rows) => self.check_rows(rows),
            CachedRows::Stale => Ok(()),
        }
    }

    /// The existing rows as one column of a struct type, for export as a record batch. It shares
    /// the memory.
    ///
    /// # Errors
    ///
    /// [`ColumnError::StaleRowCount`] if the number of rows is unknown.
    pub fn record_batch(&self) -> Result<Column, ColumnError> {
        let rows = self.rows()?;
        let columns = self.columns.iter().map(|column| column.slice(0, rows));
        let parts = ColumnParts {
            data_type: DataType::Struct(self.schema.fields().clone()),
            length: rows,
            offset: 0,
            null_count: Some(0),
            buffers: vec![None],
            children: columns.collect::<Result<_, _>>()?,
            dictionary: None,
        };
        Column::from_parts(parts)
    }

    /// Creates a buffer with space for at least `needed` rows, by the growth policy. It has the
    /// contents of this buffer, including the row count. This buffer does not change.
    ///
    /// Space for texts and binary data grows with the rows.
    ///
    /// # Errors
    ///
    /// [`ColumnError::FixedCapacity`] if the policy forbids growth, or the columns were not planned
    /// here. [`ColumnError::Allocate`], and the errors of `order`.
    ///
    /// # Safety
    ///
    /// Until this returns, no code writes this buffer's memory, except for earlier work in this
    /// order.
    pub unsafe fn grown<A: Allocate>(
        &self,
        needed: u64,
        allocator: &A,
        order: &dyn AccessOrder,
    ) -> Result<Self, ColumnError> {
        let capacity = self.growth.capacity(self.capacity, needed)?;
        let Some((plan, _)) = &self.planned else {
            return Err(ColumnError::FixedCapacity { capacity: self.capacity, needed });
        };
        let schema = SchemaRef::clone(&self.schema);
        let plan = ColumnarPlan::new(schema, capacity, plan.options().clone())?;
        let mut larger = plan.allocate(allocator, order)?.with_growth(self.growth);
        for (from, to) in self.columns.iter().zip(&larger.columns) {
            // SAFETY: the caller's promise for these columns. The others are new and not used yet.
            unsafe { copy(from, to, order) }?;
        }
        let (from, to) = (self.count.location(), larger.count.location());
        // SAFETY: as above.
        let copied = unsafe { order.copy(from, to, self.width.bytes()) };
        keep_if_in_use(copied, (self.count.clone(), larger.count.clone()))?;
        larger.cached = self.cached;
        Ok(larger)
    }

    /// Records the plan and the memory of the buffer.
    pub(super) fn keep_plan(&mut self, plan: ColumnarPlan, memory: Region) {
        self.planned = Some((plan, memory));
    }

    fn check_rows(&self, rows: u64) -> Result<(), ColumnError> {
        let capacity = self.capacity.min(self.width.most());
        if rows > capacity {
            return Err(ColumnError::OverCapacity { rows, capacity });
        }
        Ok(())
    }

    fn check_count(&self) -> Result<(), ColumnError> {
        let (needed, found) = (self.width.bytes(), self.count.length());
        if found < needed {
            return Err(ColumnError::ShortMemory { needed, found });
        }
        let (required, location) = (Alignment::of(needed.get()), self.count.location());
        if location.alignment() < required {
            return Err(ColumnError::Misaligned { buffer: "the row count", location, required });
        }
        Ok(())
    }
}

/// The schema of a buffer's record batches as a field, for the exported column.
impl From<&ColumnarBuffer> for arrow_schema::Field {
    fn from(buffer: &ColumnarBuffer) -> Self {
        let schema: &Schema = &buffer.schema;
        Self::new("", DataType::Struct(schema.fields().clone()), false)
            .with_metadata(schema.metadata().clone())
    }
}

/// Copies the part of each buffer that fits.
///
/// # Safety
///
/// Both columns have the same type. No code writes the first, and no code uses the second, except
/// for earlier work in this order.
unsafe fn copy(from: &Column, to: &Column, order: &dyn AccessOrder) -> Result<(), ColumnError> {
    for (from, to) in from.buffers().iter().zip(to.buffers()) {
        if let (Some(from), Some(to)) = (from, to) {
            let length = from.length().min(to.length());
            let region = to.region()?;
            // SAFETY: both are valid and in different memories; the rest is the caller's promise.
            let copied = unsafe { order.copy(from.location(), region.location(), length) };
            keep_if_in_use(copied, (from.clone(), to.clone()))?;
        }
    }
    for (from, to) in from.children().iter().zip(to.children()) {
        // SAFETY: as for the columns themselves.
        unsafe { copy(from, to, order) }?;
    }
    Ok(())
}
