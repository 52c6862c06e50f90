//! A columnar buffer: columns with room for rows, and how many there are, on the device.

use arrow_schema::{DataType, Schema, SchemaRef};
use terrane_core::{Alignment, Allocate, ByteCount, Memory, Region, StorageKind};

use super::order::AccessOrder;
use super::plan::ColumnarPlan;
use super::{Column, ColumnError, ColumnParts, Growth};

/// How wide the row count is that kernels write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RowCountWidth {
    /// 32 bits.
    U32,
    /// 64 bits.
    #[default]
    U64,
}

impl RowCountWidth {
    /// How many bytes that is.
    #[must_use]
    pub const fn bytes(self) -> ByteCount {
        match self {
            Self::U32 => ByteCount::new(4),
            Self::U64 => ByteCount::new(8),
        }
    }

    /// The most rows that it counts.
    #[must_use]
    pub fn most(self) -> u64 {
        match self {
            Self::U32 => u64::from(u32::MAX),
            Self::U64 => u64::MAX,
        }
    }
}

/// What the host knows of a row count that the device keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CachedRows {
    /// So many rows, when it was last read or written, and nothing has changed it since.
    Known(u64),
    /// The device may have changed it.
    Stale,
}

/// Columns with room for a number of rows, and the number of rows that there are, which kernels
/// write in the order of a stream.
///
/// The host has a copy of the row count, which is [stale](CachedRows::Stale) from when the
/// submitter of a kernel [says so](Self::mark_stale), until it is [read again](Self::refresh) in the
/// kernel's order; what needs the number refuses a stale one.
///
/// It is made by a [`ColumnarPlan`], over any allocator, or [of columns](Self::from_columns) that
/// there are already.
#[derive(Debug)]
pub struct ColumnarBuffer {
    schema: SchemaRef,
    columns: Vec<Column>,
    capacity: u64,
    count: Region,
    width: RowCountWidth,
    cached: CachedRows,
    growth: Growth,
    /// What it was allocated by; `None` for columns of others.
    planned: Option<(ColumnarPlan, Region)>,
}

impl ColumnarBuffer {
    /// A buffer of columns that there are already, ours or others', with a place for the row count
    /// beside them. What stands there is not known until it is read.
    ///
    /// # Errors
    ///
    /// [`ColumnError`] if the columns are not those of the schema, have no room for `capacity` rows,
    /// or are in different memories, or the row count is not where a number can be.
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

    /// The same buffer under a policy of growth.
    #[must_use]
    pub fn with_growth(self, growth: Growth) -> Self {
        Self { growth, ..self }
    }

    /// The schema.
    #[must_use]
    pub const fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// How many rows there is room for.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The columns, each with as many rows as there is room for.
    #[must_use]
    pub fn columns(&self) -> &[Column] {
        &self.columns
    }

    /// The column of a name.
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

    /// All of its memory, if it was allocated by a plan.
    #[must_use]
    pub fn memory(&self) -> Option<&Region> {
        self.planned.as_ref().map(|(_, memory)| memory)
    }

    /// Where the row count stands, for kernels that write it. The code that submits one says so
    /// ([`mark_stale`](Self::mark_stale)).
    #[must_use]
    pub const fn row_count(&self) -> &Region {
        &self.count
    }

    /// How wide the row count is.
    #[must_use]
    pub const fn row_count_width(&self) -> RowCountWidth {
        self.width
    }

    /// What the host knows of the row count.
    #[must_use]
    pub const fn cached_rows(&self) -> CachedRows {
        self.cached
    }

    /// How many rows there are.
    ///
    /// # Errors
    ///
    /// [`ColumnError::StaleRowCount`] if that is not known.
    pub const fn rows(&self) -> Result<u64, ColumnError> {
        match self.cached {
            CachedRows::Known(rows) => Ok(rows),
            CachedRows::Stale => Err(ColumnError::StaleRowCount),
        }
    }

    /// Says that the device may change the row count from now on: to be called when a kernel is
    /// submitted that writes it.
    pub const fn mark_stale(&mut self) {
        self.cached = CachedRows::Stale;
    }

    /// States how many rows there are, where the host knows: nothing is written or read, and no
    /// stream is waited for. What stands in the memory stays, so that a kernel that reads the count
    /// there needs [`set_rows`](Self::set_rows), or to have been preceded by one that writes it.
    ///
    /// # Errors
    ///
    /// [`ColumnError::OverCapacity`] for more rows than fit; what was known stays known.
    pub fn state_rows(&mut self, rows: u64) -> Result<(), ColumnError> {
        self.check_rows(rows)?;
        self.cached = CachedRows::Known(rows);
        Ok(())
    }

    /// Reads the row count, after what came before in `order`, and answers it.
    ///
    /// # Errors
    ///
    /// [`ColumnError::OverCapacity`] if the device says that there are more rows than fit; it stays
    /// stale then. What `order` cannot do.
    ///
    /// # Safety
    ///
    /// Whatever writes the row count came before in this order: it was submitted to this stream, or
    /// to one that this stream was made to wait for.
    pub unsafe fn refresh(&mut self, order: &dyn AccessOrder) -> Result<u64, ColumnError> {
        self.cached = CachedRows::Stale;
        let mut bytes = [0; 8];
        let (read, _) = bytes.split_at_mut(self.width.bytes().to_usize());
        // SAFETY: the region is valid and as wide, and its writers came before.
        unsafe { order.read(self.count.location(), read) }?;
        let [a, b, c, d, ..] = bytes;
        let rows = match self.width {
            RowCountWidth::U32 => u64::from(u32::from_ne_bytes([a, b, c, d])),
            RowCountWidth::U64 => u64::from_ne_bytes(bytes),
        };
        self.check_rows(rows)?;
        self.cached = CachedRows::Known(rows);
        Ok(rows)
    }

    /// Writes the row count, after what came before in `order`.
    ///
    /// # Errors
    ///
    /// [`ColumnError::OverCapacity`] for more rows than fit, and nothing is written. What `order`
    /// cannot do; the row count is stale then.
    ///
    /// # Safety
    ///
    /// No code uses the row count meanwhile, except before in this order.
    pub unsafe fn set_rows(
        &mut self,
        rows: u64,
        order: &dyn AccessOrder,
    ) -> Result<(), ColumnError> {
        self.check_rows(rows)?;
        self.cached = CachedRows::Stale;
        let location = self.count.location();
        match (self.width, u32::try_from(rows)) {
            // SAFETY: the region is valid and as wide; of its users, the caller promised.
            (RowCountWidth::U32, Ok(rows)) => unsafe { order.write(&rows.to_ne_bytes(), location) },
            // SAFETY: as above. More rows than 32 bits count were refused.
            _ => unsafe { order.write(&rows.to_ne_bytes(), location) },
        }?;
        self.cached = CachedRows::Known(rows);
        Ok(())
    }

    /// Checks that the columns are those of the schema, with room for as many rows as they are said
    /// to have, in one memory, and that no more rows are known than fit.
    ///
    /// # Errors
    ///
    /// [`ColumnError`] that says what does not fit.
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

    /// The rows that there are, as one column of a struct type: what is handed out as a record
    /// batch. It shares the memory.
    ///
    /// # Errors
    ///
    /// [`ColumnError::StaleRowCount`] if it is not known how many there are.
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

    /// A buffer with room for `needed` rows, by the policy of growth, with what this one holds, its
    /// row count included; this one stays as it is.
    ///
    /// Space for texts and binary data grows with the rows.
    ///
    /// # Errors
    ///
    /// [`ColumnError::FixedCapacity`] if the policy forbids it, or the columns were adopted and not
    /// planned here, [`ColumnError::Allocate`], and what `order` cannot do.
    ///
    /// # Safety
    ///
    /// Until this returns, no code writes this buffer's memory, except before in this order.
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
            // SAFETY: the caller's promise of these columns; the others are new, and unused yet.
            unsafe { copy(from, to, order) }?;
        }
        let (from, to) = (self.count.location(), larger.count.location());
        // SAFETY: as above.
        unsafe { order.copy(from, to, self.width.bytes()) }?;
        larger.cached = self.cached;
        Ok(larger)
    }

    /// Says what the buffer was allocated by.
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

/// The schema of a buffer's record batches, as a field: what goes with the exported column.
impl From<&ColumnarBuffer> for arrow_schema::Field {
    fn from(buffer: &ColumnarBuffer) -> Self {
        let schema: &Schema = &buffer.schema;
        Self::new("", DataType::Struct(schema.fields().clone()), false)
            .with_metadata(schema.metadata().clone())
    }
}

/// Copies what fits of each buffer.
///
/// # Safety
///
/// Both columns are of one type; no code writes the one, and no code uses the other, except before in
/// this order.
unsafe fn copy(from: &Column, to: &Column, order: &dyn AccessOrder) -> Result<(), ColumnError> {
    for (from, to) in from.buffers().iter().zip(to.buffers()) {
        if let (Some(from), Some(to)) = (from, to) {
            let length = from.length().min(to.length());
            // SAFETY: valid, of different memories, and otherwise as the caller promised.
            unsafe { order.copy(from.location(), to.region()?.location(), length) }?;
        }
    }
    for (from, to) in from.children().iter().zip(to.children()) {
        // SAFETY: as for the columns themselves.
        unsafe { copy(from, to, order) }?;
    }
    Ok(())
}
