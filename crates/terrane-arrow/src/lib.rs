//! Imports and exports Arrow arrays and columns over Terrane's memory, without a copy.
//!
//! # Should I be using this crate?
//!
//! Use it to exchange arrays with libraries that support Arrow's C interfaces (pyarrow, cuDF,
//! arrow-rs), on the host or on a device. It also stores rows of typed columns in memory of any
//! kind. Tensors are in `terrane-interop`, on which this crate depends. It handles the C
//! structures, not Python: the caller extracts pointers from capsules.
//!
//! # Limits of this crate
//!
//! It copies no element, converts no type, allocates only the small structures of the interfaces,
//! and starts no thread. It does not decide when foreign code may access memory: the `# Safety`
//! section of each unsafe function states the obligations of its caller.
//!
//! # Contents
//!
//! - [`arrays`]: import and export of Arrow arrays and schemas, on the host and on devices, and
//!   arrays of arrow-rs.
//! - [`columns`]: typed columns over Terrane's or foreign memory, and columnar buffers whose row
//!   count kernels write.
//!
//! # Example
//!
//! A column of Terrane's memory becomes an Arrow array. Normally, another library imports it; here
//! this crate does, and recognises the memory.
//!
//! ```
//! use arrow_schema::DataType;
//! use terrane_arrow::arrays::{export_array, import_array};
//! use terrane_arrow::columns::Column;
//! use terrane_core::{Allocate, ByteCount, Region, RegionRequest};
//! use terrane_storage::{SystemAllocator, SystemOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = SystemAllocator::new(SystemOptions::default());
//! let memory = memory.allocate(&RegionRequest::new(ByteCount::new(4 * 1000)))?;
//!
//! let column = Column::new(DataType::UInt32, 1000, Region::new(memory))?;
//! // SAFETY: no code writes the memory while the array is out.
//! let array = unsafe { export_array(&column) }?;
//! // SAFETY: the array was made just now, and is given once.
//! let back = unsafe { import_array(&DataType::UInt32, array) }?;
//! assert!(back.is_same(&column));
//! # Ok(())
//! # }
//! ```

/// Compiles and runs the README's example as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

pub mod arrays;
pub mod columns;

// Re-exported, because public signatures use its types.
#[doc(no_inline)]
pub use terrane_core;
#[doc(no_inline)]
pub use terrane_cuda;
#[doc(no_inline)]
pub use terrane_interop;
