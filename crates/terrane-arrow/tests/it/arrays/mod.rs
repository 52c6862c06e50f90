//! Imports and exports of Arrow arrays.

mod device;
mod extremes;
mod foreign;
mod fuzz;
mod generated;
mod hostile;
mod peers;
mod released;
mod schemas;

use terrane_arrow::arrays::abi::{ArrowArray, ArrowDeviceArray, Owned};
use terrane_arrow::arrays::{ExportError, Ready, ReleaseOrder, export_array, export_device_array};
use terrane_arrow::columns::Column;

/// Exports a column. The consumer reads only values that the test wrote.
fn exported(column: &Column) -> Result<Owned<ArrowArray>, ExportError> {
    // SAFETY: no test writes a column's memory while an array of it is exported.
    unsafe { export_array(column) }
}

/// Like [`exported`], with the device.
fn exported_with_device(column: &Column) -> Result<Owned<ArrowDeviceArray>, ExportError> {
    // SAFETY: as above.
    unsafe { export_device_array(column, Ready::Now, ReleaseOrder::AtRelease) }
}
