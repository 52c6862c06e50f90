//! Columns: typed values on the host or on a device, in Terrane's or foreign memory, and buffers of
//! columns that grow by rows.
//!
//! A [`Column`] has one type and one kind of memory. Its [`Origin`] names the owner of the memory.
//! Memory that Terrane exported is recognised when it is imported again; memory of other libraries
//! is kept alive.
//!
//! Arrays of another library are read-only. Terrane's memory from another library is read-only too,
//! because that library may still use it. Only the exported structure itself results in the
//! original column, if no other code has its memory. For other cases there is the unsafe
//! [`Column::into_writable`].
//!
//! Columns and buffers in memory of a [`MemoryManager`](terrane_pool::managed::MemoryManager) can
//! be arguments of kernels ([`Column::read_on`], [`ColumnarBuffer::write_rows_on`]), and know their
//! block. A [`ColumnarBuffer`] has the columns of a schema, space for a number of rows, and the row
//! count, which kernels write on the device.
//!
//! ```
//! use std::sync::Arc;
//! use arrow_schema::{DataType, Field, Schema};
//! use terrane_arrow::columns::{
//!     CachedRows, ColumnarOptions, ColumnarPlan, Growth, HostOrder,
//! };
//! use terrane_storage::{SystemAllocator, SystemOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let schema = Arc::new(Schema::new(vec![Field::new("token", DataType::UInt32, false)]));
//! let options = ColumnarOptions { growth: Growth::Doubling, ..ColumnarOptions::default() };
//! let plan = ColumnarPlan::new(schema, 1000, options)?;
//! let memory = SystemAllocator::new(SystemOptions::default());
//! let mut tokens = plan.allocate(&memory, &HostOrder)?;
//!
//! // SAFETY: no other code has the buffer.
//! unsafe { tokens.set_rows(600, &HostOrder) }?;
//! // On a device: submit a kernel that writes the count, and say so.
//! tokens.mark_stale();
//! assert_eq!(tokens.cached_rows(), CachedRows::Stale);
//! // SAFETY: what wrote the count came before in this order.
//! assert_eq!(unsafe { tokens.refresh(&HostOrder) }?, 600);
//! assert_eq!(tokens.record_batch()?.len(), 600);
//!
//! // SAFETY: no code writes to the buffer.
//! let larger = unsafe { tokens.grown(1500, &memory, &HostOrder) }?;
//! assert_eq!((larger.capacity(), larger.rows()?), (2000, 600));
//! # Ok(())
//! # }
//! ```

mod argument;
mod buffer;
mod column;
mod columnar;
mod error;
pub(crate) mod exported_memory;
mod growth;
mod order;
mod plan;
pub(crate) mod shape;
mod tensor;
pub(crate) mod types;

pub use buffer::ColumnBuffer;
pub use column::{Column, ColumnParts, Origin};
pub use columnar::{CachedRows, ColumnarBuffer, RowCountWidth};
pub use error::ColumnError;
pub use growth::Growth;
pub use order::{AccessOrder, HostOrder};
pub use plan::{ColumnarOptions, ColumnarPlan};
