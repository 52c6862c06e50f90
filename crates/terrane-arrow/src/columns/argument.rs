//! Columns and row counts as arguments of kernels that `cudarc` launches, and their managed blocks.

use bytemuck::Pod;
use terrane_core::{ByteCount, Region};
use terrane_cuda::cudarc::{CudaArgument, CudaArgumentMut, CudarcStream};
use terrane_pool::managed::ManagedBlock;

use super::{Column, ColumnBuffer, ColumnError, ColumnarBuffer, shape};

impl ColumnBuffer {
    /// The block of a memory manager that contains the buffer; `None` for other memory.
    #[must_use]
    pub fn block(&self) -> Option<&ManagedBlock> {
        ManagedBlock::of(self.inner())
    }

    /// As many elements as fit in the buffer, for work on a stream that reads them. The work runs
    /// after earlier writes on other streams, and before the memory is freed.
    ///
    /// # Errors
    ///
    /// As for [`CudarcStream::read_region`]: the memory must belong to a managed block.
    pub fn read_on<'a, T: Pod>(
        &'a self,
        stream: &'a CudarcStream,
    ) -> Result<CudaArgument<'a, T>, ColumnError> {
        Ok(stream.read_region(self.inner(), ByteCount::ZERO, self.elements::<T>())?)
    }

    /// Like [`read_on`](Self::read_on), for work that writes the elements.
    ///
    /// # Errors
    ///
    /// As for [`read_on`](Self::read_on), and [`ColumnError::ReadOnly`] if the buffer is read-only.
    pub fn write_on<'a, T: Pod>(
        &'a self,
        stream: &'a CudarcStream,
    ) -> Result<CudaArgumentMut<'a, T>, ColumnError> {
        Ok(stream.write_region(self.region()?, ByteCount::ZERO, self.elements::<T>())?)
    }

    fn elements<T: Pod>(&self) -> usize {
        self.length().to_usize().checked_div(size_of::<T>()).unwrap_or(0)
    }
}

impl Column {
    /// The block of a memory manager that contains the column's first buffer, or without buffers
    /// its first child's. `None` for other memory.
    #[must_use]
    pub fn block(&self) -> Option<&ManagedBlock> {
        let below = || self.children().iter().chain(self.dictionary()).find_map(Self::block);
        self.buffers().iter().flatten().next().map_or_else(below, ColumnBuffer::block)
    }

    /// The values of a column of fixed width, from its first row to its last, for work on a stream
    /// that reads them. The work runs after earlier writes on other streams, and before the memory
    /// is freed. Other buffers are [separate arguments](ColumnBuffer::read_on).
    ///
    /// # Errors
    ///
    /// As for [`CudarcStream::read_region`]: the memory must belong to a managed block.
    /// [`ColumnError::WrongElement`] if the values have another width than `T`.
    pub fn read_on<'a, T: Pod>(
        &'a self,
        stream: &'a CudarcStream,
    ) -> Result<CudaArgument<'a, T>, ColumnError> {
        let (values, skipped, len) = self.values_as::<T>()?;
        Ok(stream.read_region(values.inner(), skipped, len)?)
    }

    /// Like [`read_on`](Self::read_on), for work that writes the values.
    ///
    /// # Errors
    ///
    /// As for [`read_on`](Self::read_on), and [`ColumnError::ReadOnly`] if the column is read-only.
    pub fn write_on<'a, T: Pod>(
        &'a self,
        stream: &'a CudarcStream,
    ) -> Result<CudaArgumentMut<'a, T>, ColumnError> {
        let (values, skipped, len) = self.values_as::<T>()?;
        Ok(stream.write_region(values.region()?, skipped, len)?)
    }

    /// The values, the bytes before the first one, and their number.
    fn values_as<T: Pod>(&self) -> Result<(&ColumnBuffer, ByteCount, usize), ColumnError> {
        let refused = || ColumnError::WrongElement {
            data_type: self.data_type().clone(),
            element: ByteCount::from_usize(size_of::<T>()),
        };
        let (width, _) = shape::width(self.data_type()).ok_or_else(refused)?;
        let [_, Some(values)] = self.buffers() else { return Err(refused()) };
        if ByteCount::new(width) != ByteCount::from_usize(size_of::<T>()) {
            return Err(refused());
        }
        let skipped = ByteCount::product(&[("offset", self.offset()), ("width", width)])?;
        Ok((values, skipped, ByteCount::new(self.len()).to_usize()))
    }
}

impl ColumnarBuffer {
    /// The block of a memory manager that contains the row count. It also contains all columns if
    /// the buffer was [planned](super::ColumnarPlan). `None` for other memory.
    #[must_use]
    pub fn block(&self) -> Option<&ManagedBlock> {
        ManagedBlock::of(self.row_count())
    }

    /// The row count, for work on a stream that reads it: a `u32` or a `u64`, see
    /// [`row_count_width`](Self::row_count_width).
    ///
    /// # Errors
    ///
    /// As for [`CudarcStream::read_region`]: the memory must belong to a managed block.
    /// [`ColumnError::WrongElement`] for a number of another width.
    pub fn read_rows_on<'a, T: Pod>(
        &'a self,
        stream: &'a CudarcStream,
    ) -> Result<CudaArgument<'a, T>, ColumnError> {
        Ok(stream.read_region(self.count_as::<T>()?, ByteCount::ZERO, 1)?)
    }

    /// The row count, for work on a stream that writes it. The host's copy is
    /// [stale](super::CachedRows::Stale) from now on.
    ///
    /// # Errors
    ///
    /// As for [`read_rows_on`](Self::read_rows_on).
    pub fn write_rows_on<'a, T: Pod>(
        &'a mut self,
        stream: &'a CudarcStream,
    ) -> Result<CudaArgumentMut<'a, T>, ColumnError> {
        self.count_as::<T>()?;
        self.mark_stale();
        Ok(stream.write_region(self.row_count(), ByteCount::ZERO, 1)?)
    }

    fn count_as<T: Pod>(&self) -> Result<&Region, ColumnError> {
        let element = ByteCount::from_usize(size_of::<T>());
        if element != self.row_count_width().bytes() {
            let data_type = match self.row_count_width() {
                super::RowCountWidth::U32 => arrow_schema::DataType::UInt32,
                super::RowCountWidth::U64 => arrow_schema::DataType::UInt64,
            };
            return Err(ColumnError::WrongElement { data_type, element });
        }
        Ok(self.row_count())
    }
}
