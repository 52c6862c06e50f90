//! Arrow arrays: export and import of columns with the [C Data Interface] and the [C Device Data
//! Interface], and arrays of arrow-rs.
//!
//! Schemas, and arrays on the host ([`from_arrow`], [`to_arrow`]), are types of arrow-rs
//! ([`arrow_schema`]). The C structures of arrays are defined in [`abi`], so that they can be
//! checked before they are trusted.
//!
//! # Export
//!
//! [`export_array`] and [`export_device_array`] create a structure from a
//! [`Column`](crate::columns::Column). It keeps the memory alive until its consumer calls the
//! release callback, on any thread. Before that, the consumer may move children out, as the
//! specification permits. An array on a device states when it is [`Ready`]: after an event, for
//! which the consumer's stream waits. [`ReleaseOrder`] states when the consumer has finished: when
//! it releases the array, or when a stream has completed.
//!
//! # Import
//!
//! [`import_array`] and [`import_device_array`] check a structure, and create a read-only column
//! over the producer's memory. The structure is released once: at once if it is refused, otherwise
//! with the last user of its memory. Structures are moved as the specification requires
//! ([`Owned::take`](abi::Owned::take)): the source is marked as released.
//!
//! | field | refused values |
//! |---|---|
//! | the structure | null, misaligned, released, a child that was moved away |
//! | `length`, `offset`, `null_count` | negative (except −1 for nulls), sums past 63 bits, more nulls than rows |
//! | `n_buffers`, `n_children` | a number that does not match the type; for views, more than a million buffers |
//! | `buffers`, `children` | null although the count is not 0, misaligned |
//! | each buffer | null where it is required, misaligned, past the end of the address space |
//! | offsets | a negative first one, a last one before the first, a child that is shorter than the last |
//! | children, dictionary | missing, surplus, too short for their parent |
//! | `device_type`, `device_id` | other than the host, pinned memory, and possible CUDA devices |
//! | `sync_event` | for host memory, misaligned, or a null event |
//! | the schema | unknown formats, texts without an end or not UTF-8, nesting deeper than 64, more than 2^20 fields, more than 2^26 bytes of names and metadata, impossible lengths in metadata |
//!
//! The targets of pointers cannot be checked, so importing is unsafe. On a device, its driver
//! checks that each buffer is within one allocation, when the array is [waited
//! for](ImportedArray::wait_on).
//!
//! Terrane's memory is recognised when it is imported. An exported array results in its original
//! column. Parts of exported memory from another library are regions of that memory.
//!
//! # Example
//!
//! The other library in this example is arrow-rs. Every library with the interface works the same.
//!
//! ```
//! use arrow_array::{Array, Int32Array, make_array};
//! use terrane_arrow::arrays::{from_arrow, to_arrow};
//! use terrane_arrow::columns::Origin;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let numbers = Int32Array::from(vec![Some(1), None, Some(3)]);
//! let column = from_arrow(&numbers.to_data())?;
//! assert_eq!((column.len(), column.null_count()), (3, Some(1)));
//! assert_eq!(column.origin(), Origin::Arrow);
//!
//! // SAFETY: no code writes what arrow-rs holds to be immutable.
//! let back = make_array(unsafe { to_arrow(&column.slice(1, 2)?) }?);
//! assert_eq!(back.as_ref(), &numbers.slice(1, 2) as &dyn Array);
//! # Ok(())
//! # }
//! ```
//!
//! On a device, in the order of a stream:
//!
//! ```no_run
//! use arrow_schema::Field;
//! use terrane_cuda::Stream;
//! use terrane_arrow::arrays::abi::{ArrowDeviceArray, ArrowSchema, Owned};
//! use terrane_arrow::arrays::{ImportError, import_device_array, import_field};
//! use terrane_arrow::columns::Column;
//!
//! /// The structs that a library passes with the capsules of `__arrow_c_device_array__`.
//! ///
//! /// # Safety
//! ///
//! /// Both lead to structures that were made as the specification says.
//! unsafe fn take(
//!     schema: *mut ArrowSchema,
//!     array: *mut ArrowDeviceArray,
//!     stream: &Stream,
//! ) -> Result<(Field, Column), ImportError> {
//!     // SAFETY: the caller's promise.
//!     let field = unsafe { import_field(schema) }?;
//!     // SAFETY: the caller's promise.
//!     let Some(array) = (unsafe { Owned::take(array) }) else {
//!         return Err(ImportError::NotReady);
//!     };
//!     // SAFETY: the caller's promise.
//!     let array = unsafe { import_device_array(field.data_type(), array) }?;
//!     // Work that is submitted to the stream from now on runs after the producer's event.
//!     Ok((field, array.wait_on(stream)?))
//! }
//! ```
//!
//! [C Data Interface]: https://arrow.apache.org/docs/format/CDataInterface.html
//! [C Device Data Interface]: https://arrow.apache.org/docs/format/CDeviceDataInterface.html

pub mod abi;
mod error;
mod export;
mod host;
mod import;
mod offsets;
mod release_order;
mod schema;
mod walk;

pub use abi::DeviceType;
pub use error::{ExportError, FieldPath, ImportError};
pub use export::{Ready, export_array, export_device_array, is_exported};
pub use host::{from_arrow, to_arrow};
pub use import::{ImportedArray, import_array, import_device_array};
pub use release_order::ReleaseOrder;
pub use schema::{export_field, export_schema, import_field, import_schema};
