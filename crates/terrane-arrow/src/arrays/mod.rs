//! Arrow arrays: columns handed to other libraries and taken from them, by the [C Data Interface]
//! and the [C Device Data Interface], and arrays of arrow-rs.
//!
//! Schemas are arrow-rs's ([`arrow_schema`]); so are arrays of the host, where they are wanted as
//! such ([`from_arrow`], [`to_arrow`]). The C structures of arrays are defined [here](abi), to be
//! looked at before they are believed.
//!
//! # Out
//!
//! [`export_array`] and [`export_device_array`] make a structure of a
//! [`Column`](crate::columns::Column). It keeps the memory, until its consumer calls the release
//! callback, once, on any thread; children may be moved away before, as the specification has it.
//! An array on a device comes with what it is [`Ready`] after: an event, for which the consumer's
//! stream waits. When it is released, the consumer is [`Done`] with it, or a stream says when it is.
//!
//! # In
//!
//! [`import_array`] and [`import_device_array`] check a structure and make a column of it, whose
//! memory is the producer's own and for reading only. The structure is released once: at once if it
//! is refused, else with the last user of its memory. Structures are taken as the specification
//! moves them ([`Owned::take`](abi::Owned::take)): the source counts as released.
//!
//! | field | what is refused |
//! |---|---|
//! | the structure | null, misaligned, released, a child that was moved away |
//! | `length`, `offset`, `null_count` | negative (but −1 for nulls), sums past 63 bits, more nulls than rows |
//! | `n_buffers`, `n_children` | other numbers than the type has; of views, more than a million buffers |
//! | `buffers`, `children` | null where there are some, misaligned |
//! | each buffer | null where it may not be, misaligned, past the end of the address space |
//! | offsets | a first below zero, a last before the first, a child that is shorter than the last |
//! | children, dictionary | missing, surplus, too short for their parent |
//! | `device_type`, `device_id` | other than the host, pinned memory, and CUDA devices that can be |
//! | `sync_event` | for host memory, misaligned, or a null event |
//! | the schema | formats that are no type, texts without end or not UTF-8, nesting deeper than 64, more than 2^20 fields, more than 2^26 bytes of names and metadata, metadata whose lengths cannot be |
//!
//! What a pointer leads to cannot be checked, which is why importing is unsafe. On a device its
//! driver is asked whether a buffer lies within one of its allocations, when the array is
//! [waited for](ImportedArray::wait_on).
//!
//! Memory of ours is recognised when it comes back: an array that was exported gives its very
//! column, and where another library hands over parts of memory that is out just now, those are
//! regions of it, writable as before.
//!
//! # Example
//!
//! arrow-rs on the other side; it works the same with every library that speaks the interface.
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
//! /// What a library hands over with the capsules of `__arrow_c_device_array__`.
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
//!     // What is submitted to the stream from now on runs behind the producer's event.
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
pub use release_order::Done;
pub use schema::{export_field, export_schema, import_field, import_schema};
