//! Arrays with their device, in cases that need no driver.

use std::ffi::c_void;
use std::ptr;

use arrow_schema::DataType;
use terrane_arrow::arrays::abi::{ArrowDeviceArray, Owned};
use terrane_arrow::arrays::{DeviceType, ImportError, ImportedArray, import_device_array};
use terrane_core::{DeviceId, StorageKind};

use super::foreign::{Releases, array};

fn import(
    device_type: DeviceType,
    device_id: i64,
    spoil: impl FnOnce(&mut ArrowDeviceArray),
) -> (Result<ImportedArray, ImportError>, Releases) {
    let releases = Releases::default();
    let mut array = ArrowDeviceArray {
        array: array(&DataType::Utf8, &releases),
        device_id,
        device_type,
        sync_event: ptr::null_mut(),
        reserved: [0; 3],
    };
    spoil(&mut array);
    // SAFETY: the array's callback may be called once, after any move and on any thread.
    let array = unsafe { Owned::new(array) };
    // SAFETY: no driver checks the memory, and the host memory exists.
    (unsafe { import_device_array(&DataType::Utf8, array) }, releases)
}

#[test]
fn arrays_of_the_host_are_columns_at_once() {
    for (device_type, kind) in
        [(DeviceType::CPU, StorageKind::System), (DeviceType::CUDA_HOST, StorageKind::Pinned)]
    {
        let (array, releases) = import(device_type, -1, |_| ());
        let array = array.unwrap();
        assert!(array.kind() == kind && !array.has_event());
        let column = array.into_host().unwrap();
        assert_eq!((column.kind(), releases.count()), (Some(kind), 0));
        drop(column);
        assert_eq!(releases.count(), 1);
    }
}

#[test]
fn reserved_fields_may_hold_anything_as_they_do_in_arrays_of_arrow_cpp() {
    let (array, _) = import(DeviceType::CPU, -1, |array| array.reserved = [7, -1, i64::MIN]);
    assert!(array.unwrap().into_host().is_ok());
}

#[test]
fn arrays_of_devices_are_to_be_waited_for() {
    let (array, releases) = import(DeviceType::CUDA, 1, |_| ());
    let array = array.unwrap();
    assert_eq!(array.kind(), StorageKind::Device(DeviceId::new(1)));
    let error = array.into_host().unwrap_err();
    assert!(matches!(error, ImportError::NotReady), "{error}");
    assert_eq!(releases.count(), 1);
    let mut handle: *mut c_void = ptr::dangling_mut();
    let event = (&raw mut handle).cast();
    let (array, releases) = import(DeviceType::CUDA_HOST, 0, |array| array.sync_event = event);
    let array = array.unwrap();
    assert!(array.has_event());
    assert!(matches!(array.into_host(), Err(ImportError::NotReady)));
    assert_eq!(releases.count(), 1);
}

#[test]
fn devices_and_fields_that_have_no_meaning_are_refused() {
    let mut nothing: *mut c_void = ptr::null_mut();
    let event: *mut c_void = (&raw mut nothing).cast();
    let refusals = [
        import(DeviceType::CUDA_MANAGED, 0, |_| ()),
        import(DeviceType(0), 0, |_| ()),
        import(DeviceType(i32::MIN), 0, |_| ()),
        import(DeviceType::CUDA, -1, |_| ()),
        import(DeviceType::CUDA, i64::MAX, |_| ()),
        import(DeviceType::CPU, -1, |array| array.sync_event = event),
        import(DeviceType::CUDA, 0, |array| array.sync_event = event),
        import(DeviceType::CUDA, 0, |array| array.sync_event = event.wrapping_byte_add(1)),
        import(DeviceType::CUDA, 0, |array| array.array.length = -1),
    ];
    for (result, releases) in refusals {
        let error = result.unwrap_err();
        assert_eq!(releases.count(), 1, "{error}");
    }
}
