//! Imports and exports Arrow arrays and columns over Terrane's memory, without a copy.
//!
//! # Should I be using this crate?
//!
//! Use it to exchange arrays with libraries that support Arrow's C interfaces (pyarrow, cuDF,
//! arrow-rs), on the host or on a device. It also keeps rows of typed columns in memory of any
//! kind. Tensors are in `terrane-interop`, on which this crate is built. It handles the C
//! structures, not Python: the caller takes a pointer out of a capsule.
//!
//! # What it does not do
//!
//! It copies no element, converts no type, allocates only the small structures of the interfaces, and
//! starts no thread. It does not decide when foreign code may access memory: each unsafe function states
//! in its `# Safety` what its caller must ensure.
//!
//! # What there is
//!
//! - [`arrays`]: import and export of Arrow arrays and schemas, on the host and on devices, and
//!   arrays of arrow-rs.
//! - [`columns`]: typed columns over own or foreign memory, and columnar buffers whose row count
//!   kernels write.
//! - [`ExchangeError`]: one error that the errors of both parts convert into.
//!
//! # Example
//!
//! A column of own memory becomes an Arrow array. Another library would import it; here it comes
//! back, and is recognised as the same memory.
//!
//! ```
//! use arrow_schema::DataType;
//! use terrane_arrow::ExchangeError;
//! use terrane_arrow::arrays::{export_array, import_array};
//! use terrane_arrow::columns::Column;
//! use terrane_core::{Allocate, ByteCount, Region, RegionRequest};
//! use terrane_storage::{SystemAllocator, SystemOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = SystemAllocator::new(SystemOptions::default());
//! let memory = memory.allocate(&RegionRequest::new(ByteCount::new(4 * 1000)))?;
//!
//! let exchange = |memory: Region| -> Result<(Column, Column), ExchangeError> {
//!     let column = Column::new(DataType::UInt32, 1000, memory)?;
//!     // SAFETY: no code writes the memory while the array is out.
//!     let array = unsafe { export_array(&column) }?;
//!     // SAFETY: the array was made just now, and is given once.
//!     let back = unsafe { import_array(&DataType::UInt32, array) }?;
//!     Ok((column, back))
//! };
//! let (column, back) = exchange(Region::new(memory))?;
//! assert!(back.is_same(&column));
//! # Ok(())
//! # }
//! ```

/// The code of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod arrays;
pub mod columns;
mod error;

pub use error::ExchangeError;

// Crates whose types the public signatures name.
#[doc(no_inline)]
pub use terrane_core;
#[doc(no_inline)]
pub use terrane_cuda;
#[doc(no_inline)]
pub use terrane_interop;
