//! Arrays with wrong fields are refused, and released once.

use std::ptr;

use arrow_schema::DataType;
use terrane_arrow::arrays::abi::ArrowArray;
use terrane_arrow::arrays::{ImportError, import_array};

use super::foreign::{ROWS, Releases, array, child, get_buffer, owned, set_buffer, types};

/// The error for a changed array.
#[track_caller]
fn refusal(data_type: &DataType, spoil: impl FnOnce(&mut ArrowArray)) -> ImportError {
    let releases = Releases::default();
    let mut array = array(data_type, &releases);
    spoil(&mut array);
    // SAFETY: the array's pointers are valid for the sizes that it states, or it is refused.
    let error = unsafe { import_array(data_type, owned(array)) }.unwrap_err();
    assert_eq!(releases.count(), 1, "released once, also when it is refused: {error}");
    error
}

macro_rules! assert_refused {
    ($data_type:expr, $spoil:expr, $pattern:pat) => {
        let error = refusal(&$data_type, $spoil);
        assert!(matches!(error, $pattern), "{error:?}");
    };
}

#[test]
fn valid_arrays_are_imported_and_released_with_their_last_user() {
    for data_type in types() {
        let releases = Releases::default();
        let array = array(&data_type, &releases);
        // SAFETY: the array is valid.
        let column = unsafe { import_array(&data_type, owned(array)) }.unwrap();
        assert_eq!(column.len(), u64::try_from(ROWS).unwrap());
        let part = column.slice(3, 4).unwrap();
        drop(column);
        // A type without buffers keeps no array alive.
        let users = u32::from(data_type == DataType::Null);
        assert_eq!(releases.count(), users, "{data_type}");
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("last user".into());
            thread.spawn_scoped(scope, || drop(part)).unwrap().join().unwrap();
        });
        assert_eq!(releases.count(), 1, "{data_type}");
    }
}

#[test]
fn every_number_is_checked() {
    let int = DataType::Int64;
    assert_refused!(int, |a| a.length = -1, ImportError::Negative { what: "length", .. });
    assert_refused!(int, |a| a.offset = i64::MIN, ImportError::Negative { what: "offset", .. });
    assert_refused!(int, |a| a.null_count = -2, ImportError::Negative { what: "null_count", .. });
    assert_refused!(int, |a| a.null_count = ROWS + 1, ImportError::NullCount { .. });
    assert_refused!(int, |a| a.n_buffers = -1, ImportError::WrongCount { what: "n_buffers", .. });
    assert_refused!(int, |a| a.n_buffers = i64::MAX, ImportError::WrongCount { expected: 2, .. });
    assert_refused!(int, |a| a.n_children = 1, ImportError::WrongCount { what: "n_children", .. });
    assert_refused!(int, |a| a.length = i64::MAX, ImportError::Overflow { .. });
    assert_refused!(int, |a| a.offset = i64::MAX, ImportError::TooMany { what: "rows", .. });
    assert_refused!(int, |a| a.length = i64::MAX / 16, ImportError::AddressOverflow { .. });
    let views = DataType::Utf8View;
    assert_refused!(views, |a| a.n_buffers = 2, ImportError::WrongCount { expected: 3, .. });
    assert_refused!(views, |a| a.n_buffers = 1 << 40, ImportError::TooMany { .. });
    let lists = DataType::new_fixed_size_list(DataType::Int8, i32::MAX, true);
    let many = |a: &mut ArrowArray| {
        a.length = i64::MAX;
        set_buffer(a, 0, ptr::null());
    };
    assert_refused!(lists, many, ImportError::Overflow { .. });
    let many = |a: &mut ArrowArray| a.length = i64::MAX;
    assert_refused!(lists, many, ImportError::AddressOverflow { buffer: "validity", .. });
}

#[test]
fn every_pointer_is_checked() {
    let int = DataType::Int64;
    assert_refused!(
        int,
        |a| a.buffers = ptr::null_mut(),
        ImportError::Null { what: "buffers", .. }
    );
    assert_refused!(
        int,
        |a| set_buffer(a, 1, ptr::null()),
        ImportError::Null { what: "values", .. }
    );
    let without_bitmap = |a: &mut ArrowArray| {
        set_buffer(a, 0, ptr::null());
        a.null_count = 1;
    };
    assert_refused!(int, without_bitmap, ImportError::Null { what: "the validity bitmap", .. });
    let askew = |a: &mut ArrowArray| set_buffer(a, 1, get_buffer(a, 1).wrapping_byte_add(4));
    assert_refused!(int, askew, ImportError::Misaligned { .. });
    let at_the_end = |a: &mut ArrowArray| set_buffer(a, 1, ptr::without_provenance(usize::MAX - 7));
    assert_refused!(int, at_the_end, ImportError::AddressOverflow { .. });
    let list = DataType::new_list(DataType::Int8, true);
    assert_refused!(
        list,
        |a| a.children = ptr::null_mut(),
        ImportError::Null { what: "children", .. }
    );
    let dictionary = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
    // The array's private data still has the dictionary's pointer, and releases it.
    assert_refused!(dictionary, |a| a.dictionary = ptr::null_mut(), ImportError::Null { .. });
    // The pointer is only compared with null.
    let with_dictionary = |a: &mut ArrowArray| a.dictionary = ptr::from_mut(a);
    assert_refused!(int, with_dictionary, ImportError::WrongCount { what: "dictionaries", .. });
}

#[test]
fn pointers_to_structures_are_aligned() {
    let list = DataType::new_list(DataType::Int8, true);
    let askew = |a: &mut ArrowArray| a.buffers = a.buffers.wrapping_byte_add(4);
    assert_refused!(list, askew, ImportError::MisalignedPointer { what: "buffers", .. });
    let askew = |a: &mut ArrowArray| a.children = a.children.wrapping_byte_add(1);
    assert_refused!(list, askew, ImportError::MisalignedPointer { what: "children", .. });
    let keys = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
    let askew = |a: &mut ArrowArray| a.dictionary = a.dictionary.wrapping_byte_add(2);
    assert_refused!(keys, askew, ImportError::MisalignedPointer { what: "dictionary", .. });
}

#[test]
fn children_have_to_be_there_and_long_enough() {
    let list = DataType::new_fixed_size_list(DataType::Int32, 3, true);
    assert_refused!(
        list,
        |a| child(a, 0).length = 3 * ROWS - 1,
        ImportError::ShortChild { needed: 300, found: 299, .. }
    );
    let structure = types().pop().unwrap();
    assert_refused!(structure, |a| child(a, 1).length = ROWS - 1, ImportError::ShortChild { .. });
    assert_refused!(structure, |a| a.offset = 4 * ROWS + 1, ImportError::ShortChild { .. });
    let error = refusal(&structure, |a| child(a, 1).length = -3);
    assert!(error.to_string().contains("`text`"), "{error}");
    let released = |a: &mut ArrowArray| {
        // SAFETY: moved out, as the specification permits, and released here.
        drop(unsafe { terrane_arrow::arrays::abi::Owned::take(child(a, 0)) });
    };
    assert_refused!(structure, released, ImportError::Released { .. });
}

#[test]
fn offsets_have_to_run_forward_and_within_their_child() {
    let list = DataType::new_list(DataType::Int8, true);
    let offset = |at: i64, value: i32| {
        move |a: &mut ArrowArray| {
            let offsets = get_buffer(a, 1).cast_mut().cast::<i32>();
            let at = usize::try_from(at).unwrap();
            // SAFETY: the buffer is longer, and no code reads it yet.
            unsafe { offsets.wrapping_add(at).write(value) };
        }
    };
    assert_refused!(list, offset(0, -1), ImportError::Offsets { first: -1, last: 0, .. });
    assert_refused!(list, offset(ROWS, -1), ImportError::Offsets { last: -1, .. });
    assert_refused!(list, offset(0, 5), ImportError::Offsets { first: 5, last: 0, .. });
    assert_refused!(list, offset(ROWS, 501), ImportError::ShortChild { needed: 501, .. });
    let views = |a: &mut ArrowArray| {
        a.n_buffers = 3;
        // SAFETY: as above.
        unsafe { get_buffer(a, 2).cast_mut().cast::<i64>().write(-1) };
    };
    // Without data there are no sizes, so the buffer is not read.
    let releases = Releases::default();
    let mut array = array(&DataType::Utf8View, &releases);
    views(&mut array);
    // SAFETY: the array is valid.
    assert!(unsafe { import_array(&DataType::Utf8View, owned(array)) }.is_ok());
}

#[test]
fn a_type_that_no_array_has_is_refused() {
    let releases = Releases::default();
    let negative = DataType::FixedSizeBinary(-4);
    // SAFETY: no field of the array is used.
    let error =
        unsafe { import_array(&negative, owned(array(&DataType::Int8, &releases))) }.unwrap_err();
    assert!(matches!(error, ImportError::Format { .. }), "{error}");
    let mut deep = DataType::Int8;
    for _ in 0..100 {
        deep = DataType::new_list(deep, true);
    }
    // SAFETY: as above.
    let error =
        unsafe { import_array(&deep, owned(array(&DataType::Int8, &releases))) }.unwrap_err();
    assert!(matches!(error, ImportError::TooMany { .. }), "{error}");
    assert_eq!(releases.count(), 2);
}
