//! Imports and exports of Arrow arrays and record batches, on the host and with their device.

use std::sync::Arc;

use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, Schema};
use terrane_arrow::arrays::abi::{ArrowArray, ArrowDeviceArray, ArrowSchema, Owned, Released};
use terrane_arrow::arrays::{
    Ready, ReleaseOrder, export_array, export_device_array, export_field, import_array,
    import_device_array, import_field, is_exported, to_arrow,
};
use terrane_arrow::columns::{
    AccessOrder, Column, ColumnarOptions, ColumnarPlan, HostOrder, Origin,
};
use terrane_core::convert::to_u64;
use terrane_core::{BoxedCause, ByteCount, Location};
use terrane_storage::{SystemAllocator, SystemOptions};

use crate::calls::{answer, drop_value};
use crate::dlpack::counted;
use crate::live_counts::{LiveCount, Resource};

/// A column and its field, owned by Python.
pub struct Held {
    field: Field,
    column: Column,
}

/// The properties of a column.
#[repr(C)]
pub struct ColumnFacts {
    rows: u64,
    offset: u64,
    /// −1 if it is unknown.
    null_count: i64,
    buffers: u64,
    children: u64,
    /// The start of the second buffer; 0 for a type without one.
    address: u64,
    /// 0: this library, 1: DLPack, 2: Arrow.
    origin: u32,
}

/// A foreign array, counted until its callback is called.
struct Watched {
    theirs: ArrowArray,
    _entry: LiveCount,
}

/// Wraps an array's callback with a counter.
fn watched(array: Owned<ArrowArray>) -> Owned<ArrowArray> {
    let theirs = array.into_inner();
    let ArrowArray { length, null_count, offset, n_buffers, n_children, .. } = theirs;
    let ArrowArray { buffers, children, dictionary, .. } = theirs;
    let watched = Box::new(Watched { theirs, _entry: LiveCount::new(Resource::Imports) });
    let array = ArrowArray {
        length,
        null_count,
        offset,
        n_buffers,
        n_children,
        buffers,
        children,
        dictionary,
        release: Some(release_watched),
        private_data: Box::into_raw(watched).cast(),
    };
    // SAFETY: the callback may be called once, after any move and on any thread.
    unsafe { Owned::new(array) }
}

/// # Safety
///
/// The array came from [`watched`], or was moved from such an array.
unsafe extern "C" fn release_watched(array: *mut ArrowArray) {
    // SAFETY: the caller owns the array during its release.
    let array = unsafe { &mut *array };
    if array.release.take().is_none() {
        return;
    }
    // SAFETY: it was boxed when it was created, and is converted back once.
    let mut watched = unsafe { Box::from_raw(array.private_data.cast::<Watched>()) };
    // SAFETY: it was moved into the box, and is released only here.
    unsafe { watched.theirs.release() };
}

/// Creates a record batch of `rows` rows in this library's memory. `token` is the row number. Every
/// third `score`, beginning with the first, is null; the others are half the row number. `odd`
/// states whether the row number is odd.
///
/// # Safety
///
/// `held` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_make(rows: u64, held: *mut *mut Held) -> i32 {
    answer(|| {
        let fields = vec![
            Field::new("token", DataType::UInt32, false),
            Field::new("score", DataType::Float64, true),
            Field::new("odd", DataType::Boolean, false),
        ];
        let schema = Arc::new(Schema::new(fields));
        let plan = ColumnarPlan::new(schema, rows, ColumnarOptions::default())?;
        let memory = counted(&SystemAllocator::new(SystemOptions::default()), plan.size())?;
        // SAFETY: the memory is new, and no other code uses it.
        let mut buffer = unsafe { plan.over(memory, &HostOrder) }?;
        let tokens: Vec<u8> = (0..u32::try_from(rows)?).flat_map(u32::to_ne_bytes).collect();
        let halves = (0..u32::try_from(rows)?).map(|row| f64::from(row) / 2.0);
        let halves: Vec<u8> = halves.flat_map(f64::to_ne_bytes).collect();
        let columns = buffer.columns();
        write(columns, 0, 1, &tokens)?;
        write(columns, 1, 0, &bits(rows, |row| row % 3 != 0))?;
        write(columns, 1, 1, &halves)?;
        write(columns, 2, 1, &bits(rows, |row| row % 2 == 1))?;
        // SAFETY: as above.
        unsafe { buffer.set_rows(rows, &HostOrder) }?;
        let made = Held { field: Field::from(&buffer), column: buffer.record_batch()? };
        // SAFETY: the caller's promise.
        unsafe { held.write(Box::into_raw(Box::new(made))) };
        Ok(())
    })
}

fn bits(rows: u64, is_set: impl Fn(u64) -> bool) -> Vec<u8> {
    let byte =
        |at: u64| (0..8).filter(|bit| is_set(8 * at + bit)).fold(0, |byte, bit| byte | 1 << bit);
    (0..rows.div_ceil(8)).map(byte).collect()
}

fn write(columns: &[Column], at: usize, buffer: usize, bytes: &[u8]) -> Result<(), BoxedCause> {
    let column = columns.get(at).ok_or("no such column")?;
    let buffer = column.buffers().get(buffer).and_then(Option::as_ref).ok_or("no such buffer")?;
    if buffer.region().is_err() || buffer.length() < ByteCount::from_usize(bytes.len()) {
        return Err("a buffer that cannot be written".into());
    }
    // SAFETY: the buffer has that length, and was made for this call.
    Ok(unsafe { HostOrder.write(bytes, buffer.location()) }?)
}

/// Imports an array from its structures. It takes ownership of them even if the import fails.
///
/// # Safety
///
/// The structures are Arrow's, and the caller owns them. `held` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_import(
    schema: *mut ArrowSchema,
    array: *mut ArrowArray,
    held: *mut *mut Held,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let array = unsafe { Owned::take(array) };
        // SAFETY: the caller's promise.
        let field = unsafe { import_field(schema) }?;
        let array = array.ok_or("the array has been released")?;
        let array = if is_exported(array.get()) { array } else { watched(array) };
        // SAFETY: the caller's promise.
        let column = unsafe { import_array(field.data_type(), array) }?;
        // SAFETY: the caller's promise.
        unsafe { held.write(Box::into_raw(Box::new(Held { field, column }))) };
        Ok(())
    })
}

/// Like [`terrane_proof_arrow_import`], for a device array in host memory.
///
/// # Safety
///
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_import_device(
    schema: *mut ArrowSchema,
    array: *mut ArrowDeviceArray,
    held: *mut *mut Held,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let array = unsafe { Owned::take(array) };
        // SAFETY: the caller's promise.
        let field = unsafe { import_field(schema) }?;
        let array = array.ok_or("the array has been released")?;
        let array = if is_exported(&array.get().array) {
            array
        } else {
            let ArrowDeviceArray { device_id, device_type, sync_event, reserved, .. } =
                *array.get();
            let array = watched(array.into()).into_inner();
            let array = ArrowDeviceArray { array, device_id, device_type, sync_event, reserved };
            // SAFETY: the callback belongs to `watched`, and the array was moved out of its owner.
            unsafe { Owned::new(array) }
        };
        // SAFETY: the caller's promise.
        let array = unsafe { import_device_array(field.data_type(), array) }?;
        let column = array.into_host()?;
        // SAFETY: the caller's promise.
        unsafe { held.write(Box::into_raw(Box::new(Held { field, column }))) };
        Ok(())
    })
}

/// Writes the structures of a column to the caller's memory.
///
/// # Safety
///
/// `held` came from this library, and no code writes its memory until the array is released. Both
/// destinations may be written, and contain nothing that must be released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_export(
    held: *const Held,
    schema: *mut ArrowSchema,
    array: *mut ArrowArray,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { &*held };
        let field = export_field(&held.field)?;
        // SAFETY: the caller's promise.
        let column = unsafe { export_array(&held.column) }?;
        // SAFETY: the caller's promise.
        unsafe { field.give(schema) };
        // SAFETY: the caller's promise.
        unsafe { column.give(array) };
        Ok(())
    })
}

/// Like [`terrane_proof_arrow_export`], with the device.
///
/// # Safety
///
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_export_device(
    held: *const Held,
    schema: *mut ArrowSchema,
    array: *mut ArrowDeviceArray,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { &*held };
        let field = export_field(&held.field)?;
        // SAFETY: the caller's promise; no device uses host memory.
        let column =
            unsafe { export_device_array(&held.column, Ready::Now, ReleaseOrder::AtRelease) }?;
        // SAFETY: the caller's promise.
        unsafe { field.give(schema) };
        // SAFETY: the caller's promise.
        unsafe { column.give(array) };
        Ok(())
    })
}

/// Releases structures that no consumer took. Either may be null, or already released.
///
/// # Safety
///
/// They are null, or structures of Arrow that the caller owns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_release(
    schema: *mut ArrowSchema,
    array: *mut ArrowArray,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        drop(unsafe { Owned::take(schema) });
        // SAFETY: the caller's promise.
        drop(unsafe { Owned::take(array) });
        Ok(())
    })
}

/// Writes the properties of a column, or of the child with that number if it is not negative.
///
/// # Safety
///
/// `held` came from this library, and `facts` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_facts(
    held: *const Held,
    child: i64,
    facts: *mut ColumnFacts,
) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        let column = unsafe { &(*held).column };
        let column = match usize::try_from(child) {
            Ok(child) => column.children().get(child).ok_or("no such child")?,
            Err(_) => column,
        };
        let count = |length| to_u64(length);
        let address = match column.buffers().get(1).and_then(Option::as_ref) {
            Some(buffer) => match buffer.location() {
                Location::Host(address) => address.get(),
                other => return Err(format!("a column at {other}").into()),
            },
            None => 0,
        };
        let found = ColumnFacts {
            rows: column.len(),
            offset: column.offset(),
            null_count: column.null_count().map(i64::try_from).transpose()?.unwrap_or(-1),
            buffers: count(column.buffers().len()),
            children: count(column.children().len()),
            address,
            origin: match column.origin() {
                Origin::Owned => 0,
                Origin::DlPack => 1,
                _ => 2,
            },
        };
        // SAFETY: the caller's promise.
        unsafe { facts.write(found) };
        Ok(())
    })
}

/// Whether two columns have equal values, compared by arrow-rs after it has checked both.
///
/// # Safety
///
/// Both came from this library, and no code writes their memory. `equal` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_equal(
    first: *const Held,
    second: *const Held,
    equal: *mut i32,
) -> i32 {
    answer(|| {
        let data = |held: *const Held| -> Result<ArrayData, BoxedCause> {
            // SAFETY: the caller's promise.
            let column = unsafe { &(*held).column };
            // SAFETY: the caller's promise.
            Ok(unsafe { to_arrow(column) }?)
        };
        let is_equal = data(first)? == data(second)?;
        // SAFETY: the caller's promise.
        unsafe { equal.write(is_equal.into()) };
        Ok(())
    })
}

/// Drops a column, on another thread if requested.
///
/// # Safety
///
/// `held` came from this library, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn terrane_proof_arrow_drop(held: *mut Held, elsewhere: i32) -> i32 {
    answer(|| {
        // SAFETY: the caller's promise.
        drop_value(unsafe { Box::from_raw(held) }, elsewhere != 0)
    })
}
