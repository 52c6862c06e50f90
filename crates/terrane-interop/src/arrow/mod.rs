//! Arrow arrays: columns handed to other libraries and taken from them, by the C Data Interface and
//! the C Device Data Interface, and arrays of arrow-rs.
pub mod abi;
mod error;
mod export;
mod host;
mod import;
mod peek;
mod schema;

pub use abi::DeviceType;
pub use error::{ExportError, FieldPath, ImportError};
pub use export::{Ready, export_array, export_device_array, is_exported};
pub use host::{from_arrow, to_arrow};
pub use import::{ImportedArray, import_array, import_device_array};
pub use schema::{export_field, export_schema, import_field, import_schema};
