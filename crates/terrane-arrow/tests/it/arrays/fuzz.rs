//! An array with any error is imported or refused, and released once.

use std::ffi::c_void;
use std::ptr;

use arrow_array::make_array;
use proptest::prelude::*;
use terrane_arrow::arrays::abi::{ArrowArray, ArrowDeviceArray, Owned};
use terrane_arrow::arrays::{DeviceType, ImportError, import_array, import_device_array, to_arrow};

use super::foreign::{Releases, array, child, get_buffer, owned, set_buffer, types};
use super::generated::data_type;

/// A change to an array. Pointers become null or misaligned, never wild, because no code can check
/// their targets. Numbers are small enough for the buffers, or too large for any memory.
#[derive(Clone, Copy, Debug)]
enum Spoil {
    Length(i64),
    Offset(i64),
    NullCount(i64),
    Buffers(i64),
    Children(i64),
    NoBuffers,
    NoChildren,
    NoDictionary,
    NoBuffer(usize),
    Askew(usize),
    Offsets(usize, i64),
    NotReleasable,
}

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![
        -3_i64..1000,
        Just(i64::MIN),
        Just(i64::MAX),
        Just(i64::MAX - 1),
        // More than any memory, even in bits.
        (1_i64 << 60)..i64::MAX,
    ]
}

fn spoil() -> impl Strategy<Value = Spoil> {
    // The actual number or fewer, or more than any type has.
    let count = || prop_oneof![-2_i64..=0, Just(9), Just(i64::MAX), Just(i64::MIN)];
    prop_oneof![
        number().prop_map(Spoil::Length),
        number().prop_map(Spoil::Offset),
        number().prop_map(Spoil::NullCount),
        count().prop_map(Spoil::Buffers),
        count().prop_map(Spoil::Children),
        Just(Spoil::NoBuffers),
        Just(Spoil::NoChildren),
        Just(Spoil::NoDictionary),
        (0_usize..3).prop_map(Spoil::NoBuffer),
        (0_usize..3).prop_map(Spoil::Askew),
        // As 64 or as 32 bits: negative, or within the buffers.
        (0_usize..500, prop_oneof![-3_i64..1000, Just(i64::MIN)])
            .prop_map(|(at, value)| Spoil::Offsets(at, value)),
        Just(Spoil::NotReleasable),
    ]
}

fn apply(array: &mut ArrowArray, spoil: Spoil, is_top: bool) {
    let buffers = usize::try_from(array.n_buffers).unwrap_or(0).min(3);
    let has = |index: usize| index < buffers && !array.buffers.is_null();
    match spoil {
        Spoil::Length(value) => array.length = value,
        Spoil::Offset(value) => array.offset = value,
        Spoil::NullCount(value) => array.null_count = value,
        // For views any number is valid, so it must not exceed the actual one.
        Spoil::Buffers(value) => array.n_buffers = value.min(0),
        Spoil::Children(value) => array.n_children = value,
        Spoil::NoBuffers => array.buffers = ptr::null_mut(),
        Spoil::NoChildren => array.children = ptr::null_mut(),
        Spoil::NoDictionary => array.dictionary = ptr::null_mut(),
        Spoil::NoBuffer(index) if has(index) => set_buffer(array, index, ptr::null()),
        Spoil::Askew(index) if has(index) && !get_buffer(array, index).is_null() => {
            let pointer: *const c_void = get_buffer(array, index).wrapping_byte_add(1);
            set_buffer(array, index, pointer);
        }
        Spoil::Offsets(at, value) if has(1) => {
            let pointer = get_buffer(array, 1).cast_mut().cast::<i64>();
            if !pointer.is_null() {
                // SAFETY: the buffer has more than 500 numbers, and no code reads it yet.
                unsafe { pointer.wrapping_add(at).write_unaligned(value) };
            }
        }
        // At the top level, the array would never be released, as this flag states.
        Spoil::NotReleasable if !is_top => {
            // SAFETY: it is moved out, and released here.
            drop(unsafe { Owned::take(array) });
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn spoiled_arrays_are_taken_or_refused_and_released_once(
        which in 0..types().len(),
        spoils in proptest::collection::vec((spoil(), any::<bool>()), 0..4),
    ) {
        let data_type = types().swap_remove(which);
        let releases = Releases::default();
        let mut array = array(&data_type, &releases);
        let has_child = array.n_children > 0;
        for (spoil, below) in spoils {
            let children = array.n_children > 0 && !array.children.is_null();
            if below && has_child && children && child(&mut array, 0).release.is_some() {
                apply(child(&mut array, 0), spoil, false);
            } else {
                apply(&mut array, spoil, true);
            }
        }
        // SAFETY: pointers are null or point to the producer's buffers, which are large enough for
        // rows counted by numbers below a thousand. Larger numbers are refused before they are
        // used.
        let column = unsafe { import_array(&data_type, owned(array)) };
        if let Ok(column) = column {
            prop_assert_eq!(releases.count(), u32::from(column.kind().is_none()));
            // SAFETY: no code writes the buffers.
            let _ = unsafe { to_arrow(&column) };
        }
        prop_assert_eq!(releases.count(), 1);
    }

    /// Arrays of any type. Nothing reads values that are wider than the producer's buffers.
    #[test]
    fn spoiled_arrays_of_any_type_are_taken_or_refused_and_released_once(
        data_type in data_type(),
        spoils in proptest::collection::vec(spoil(), 0..3),
    ) {
        let releases = Releases::default();
        let mut array = array(&data_type, &releases);
        spoils.into_iter().for_each(|spoil| apply(&mut array, spoil, true));
        // SAFETY: as above; only offsets, views and keys are read, which are narrow.
        let column = unsafe { import_array(&data_type, owned(array)) };
        if let Ok(column) = column {
            prop_assert_eq!(releases.count(), u32::from(column.kind().is_none()));
            // SAFETY: no code writes the buffers.
            if let Ok(data) = unsafe { to_arrow(&column) } {
                drop(make_array(data));
            }
        }
        prop_assert_eq!(releases.count(), 1);
    }

    #[test]
    fn spoiled_arrays_of_any_device_are_taken_or_refused_and_released_once(
        which in 0..types().len(),
        spoils in proptest::collection::vec(spoil(), 0..3),
        device_type in prop_oneof![6 => 1..=3_i32, 1 => Just(13), 1 => any::<i32>()],
        device_id in prop_oneof![6 => -1..=1_i64, 1 => any::<i64>()],
        event in 0..5_usize,
        reserved in any::<[i64; 3]>(),
    ) {
        let data_type = types().swap_remove(which);
        let releases = Releases::default();
        let mut array = array(&data_type, &releases);
        spoils.into_iter().for_each(|spoil| apply(&mut array, spoil, true));
        // Half of the time there is no handle. Otherwise there is one that is not passed to the
        // driver, a null handle, or a misaligned one.
        let handles: [*mut c_void; 2] = [ptr::dangling_mut(), ptr::null_mut()];
        let place = |index: usize| handles.as_ptr().wrapping_add(index).cast_mut().cast::<c_void>();
        let sync_event = match event {
            0 => place(0),
            1 => place(1),
            2 => place(0).wrapping_byte_add(1),
            _ => ptr::null_mut(),
        };
        let device_type = DeviceType(device_type);
        let array = ArrowDeviceArray { array, device_id, device_type, sync_event, reserved };
        // SAFETY: the callback may be called once, after any move and on any thread.
        let array = unsafe { Owned::new(array) };
        // SAFETY: as for `import_array`; memory that is declared as a device's is not read.
        let imported = unsafe { import_device_array(&data_type, array) };
        if let Ok(imported) = imported {
            prop_assert!((1..=3).contains(&device_type.0), "{device_type}");
            prop_assert_eq!((imported.has_event(), releases.count()), (event == 0, 0));
            let is_ready = imported.kind().is_host() && event != 0;
            match imported.into_host() {
                Ok(column) => {
                    prop_assert!(is_ready);
                    prop_assert_eq!(releases.count(), u32::from(column.kind().is_none()));
                }
                Err(ImportError::NotReady) => prop_assert!(!is_ready),
                // The offsets are read only now.
                Err(_) => prop_assert!(is_ready),
            }
        }
        prop_assert_eq!(releases.count(), 1);
    }
}
