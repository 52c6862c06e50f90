//! Tensors with arbitrary fields. Each is refused with a typed error or imported, and released
//! exactly once in either case.

use proptest::prelude::*;
use terrane_core::{Location, Memory, Region};
use terrane_interop::dlpack::{ExportError, ImportError, ImportedTensor, Importer, TensorExport};

use crate::peer::{Axes, Deleted, Fields, reclaim, reclaim_legacy};

fn any_axes() -> impl Strategy<Value = Axes> {
    let number = prop_oneof![
        6 => 0_i64..5,
        1 => any::<i64>(),
        1 => Just(i64::MIN),
        1 => Just(i64::MAX),
        1 => -3_i64..0,
    ];
    let numbers = || prop::collection::vec(number.clone(), 0..6);
    prop_oneof![
        6 => numbers().prop_map(Axes::There),
        2 => Just(Axes::Null),
        1 => numbers().prop_map(Axes::Misaligned),
    ]
}

fn any_fields() -> impl Strategy<Value = Fields> {
    let version = prop_oneof![6 => Just((1, 3)), 1 => any::<(u32, u32)>()];
    let data = prop_oneof![3 => Just(0x1000_usize), 1 => Just(0), 1 => any::<usize>()];
    let device = prop_oneof![
        6 => Just((1, 0)),
        1 => Just((2, 0)),
        1 => Just((3, 0)),
        1 => any::<(u32, i32)>()
    ];
    let ndim = prop_oneof![6 => 0..5_i32, 1 => any::<i32>(), 1 => 60..70_i32];
    let dtype =
        prop_oneof![6 => Just((4, 16, 1)), 1 => Just((17, 4, 2)), 2 => any::<(u8, u8, u16)>()];
    let offset = prop_oneof![4 => Just(0_u64), 1 => 0_u64..64, 1 => any::<u64>()];
    (
        (version, any::<u64>(), data, device, ndim),
        (dtype, any_axes(), any_axes(), offset, any::<bool>()),
    )
        .prop_map(|((version, flags, data, device, ndim), rest)| {
            let (dtype, shape, strides, byte_offset, has_deleter) = rest;
            Fields {
                version,
                flags,
                data,
                device,
                ndim,
                dtype,
                shape,
                strides,
                byte_offset,
                has_deleter,
            }
        })
}

/// Checks that hold for every imported tensor.
fn check(tensor: &ImportedTensor, fields: &Fields) {
    let shape = tensor.shape();
    assert_eq!(i32::try_from(shape.sizes().len()), Ok(fields.ndim));
    assert!(shape.sizes().iter().all(|&size| size >= 0));
    assert!(i64::try_from(shape.bytes().get()).is_ok());
    let Location::Host(address) = tensor.location() else { panic!("{tensor:?}") };
    let expected = u64::try_from(fields.data).unwrap().wrapping_add(fields.byte_offset);
    if shape.elements() > 0 {
        assert_eq!(address.get(), expected);
        assert!(address.get().checked_add(shape.bytes().get()).is_some());
    }
    match tensor.memory() {
        Ok(memory) => {
            assert!(!tensor.is_read_only() && shape.is_dense());
            assert_eq!(memory.length(), shape.bytes());
            assert_eq!(memory.location(), tensor.location());
        }
        Err(ImportError::ReadOnly) => assert!(tensor.is_read_only()),
        Err(ImportError::Gaps { .. }) => assert!(!shape.is_dense()),
        Err(other) => panic!("{other}"),
    }
}

fn settle(result: Result<ImportedTensor, ImportError>, fields: &Fields, deleted: &Deleted) {
    let calls = usize::from(fields.has_deleter);
    match result {
        Ok(tensor) => {
            check(&tensor, fields);
            let memory = tensor.memory();
            let clone = tensor.clone();
            drop(tensor);
            drop(clone);
            if memory.is_ok() {
                assert_eq!(deleted.count(), 0, "the memory still owns the tensor");
            }
            drop(memory);
        }
        Err(error) => {
            assert!(error.was_released(), "{error}");
            assert!(!error.to_string().is_empty());
        }
    }
    assert_eq!(deleted.count(), calls);
}

proptest! {
    #[test]
    fn versioned_tensors_of_any_fields(fields in any_fields()) {
        let deleted = Deleted::default();
        let tensor = fields.versioned(&deleted);
        // SAFETY: the axes are readable up to the maximum of a tensor, the deleter may run on any
        // thread, and the imported tensor's data is not accessed.
        settle(unsafe { Importer::new().versioned(tensor) }, &fields, &deleted);
        if !fields.has_deleter {
            // SAFETY: no code uses it any more.
            unsafe { reclaim(tensor) };
        }
    }

    #[test]
    fn legacy_tensors_of_any_fields(fields in any_fields()) {
        let deleted = Deleted::default();
        let tensor = fields.legacy(&deleted);
        let fields = Fields { flags: 0, ..fields };
        // SAFETY: as for versioned tensors.
        settle(unsafe { Importer::new().legacy(tensor) }, &fields, &deleted);
        if !fields.has_deleter {
            // SAFETY: no code has it any more.
            unsafe { reclaim_legacy(tensor) };
        }
    }
}

/// The error for a valid tensor after `change` has modified its fields.
fn refused(change: impl FnOnce(&mut Fields)) -> ImportError {
    let mut bytes = vec![0_u8; 64];
    let mut fields = Fields::over(&mut bytes, &[2, 3]);
    change(&mut fields);
    let deleted = Deleted::default();
    let tensor = fields.versioned(&deleted);
    // SAFETY: as above.
    let error = unsafe { Importer::new().versioned(tensor) }.unwrap_err();
    assert_eq!(deleted.count(), 1, "{error}");
    error
}

#[test]
fn every_field_has_its_error() {
    use terrane_interop::dlpack::ShapeError as S;
    type E = ImportError;
    let there = |numbers: &[i64]| Axes::There(numbers.to_vec());
    assert!(matches!(refused(|f| f.version = (2, 0)), E::UnknownVersion { major: 2, minor: 0 }));
    assert!(matches!(refused(|f| f.version = (0, 8)), E::UnknownVersion { .. }));
    assert!(matches!(refused(|f| f.ndim = -1), E::NegativeRank { ndim: -1 }));
    assert!(matches!(refused(|f| f.ndim = 65), E::Shape(S::TooManyAxes { axes: 65 })));
    assert!(matches!(refused(|f| f.ndim = i32::MAX), E::Shape(S::TooManyAxes { .. })));
    let unreadable = refused(|f| f.shape = Axes::Null);
    assert!(matches!(unreadable, E::UnreadableAxes { field: "shape", axes: 2, address: 0 }));
    let unreadable = refused(|f| f.strides = Axes::Misaligned(vec![3, 1]));
    assert!(matches!(unreadable, E::UnreadableAxes { field: "strides", axes: 2, .. }));
    let negative = refused(|f| f.shape = there(&[2, -3]));
    assert!(matches!(negative, E::Shape(S::NegativeSize { axis: 1, size: -3 })));
    let reversed = refused(|f| f.strides = there(&[3, -1]));
    assert!(matches!(reversed, E::Shape(S::NegativeStride { axis: 1, stride: -1 })));
    let broadcast = refused(|f| f.strides = there(&[0, 1]));
    assert!(matches!(broadcast, E::Shape(S::Repeated { axis: 0, count: 2 })));
    let overlap = refused(|f| f.strides = there(&[2, 1]));
    assert!(matches!(overlap, E::Shape(S::Overlap { axis: 0, stride: 2, inner: 3 })));
    let large = refused(|f| f.shape = there(&[i64::MAX, i64::MAX]));
    assert!(matches!(large, E::Shape(S::TooManyElements { axis: 1, .. })));
    assert!(matches!(refused(|f| f.dtype = (4, 0, 1)), E::ElementType(_)));
    assert!(matches!(refused(|f| f.dtype = (4, 16, 0)), E::ElementType(_)));
    assert!(matches!(refused(|f| f.dtype = (77, 16, 1)), E::ElementType(_)));
    assert!(matches!(refused(|f| f.device = (13, 0)), E::UnknownDevice { device_type: 13, .. }));
    assert!(matches!(refused(|f| f.device = (1, 3)), E::UnknownDevice { device_id: 3, .. }));
    assert!(matches!(refused(|f| f.device = (2, -1)), E::UnknownDevice { device_id: -1, .. }));
    assert!(matches!(refused(|f| f.device = (2, 5)), E::NoContext { .. }));
    assert!(matches!(refused(|f| f.data = 0), E::NullData { elements: 6 }));
    assert!(matches!(refused(|f| f.byte_offset = u64::MAX), E::AddressOverflow { .. }));
    assert!(matches!(refused(|f| f.byte_offset = 1), E::MisalignedData { .. }));
    // For an unknown version, the shape is not read either.
    let unknown = refused(|f| {
        f.version = (9, 9);
        f.shape = Axes::Null;
    });
    assert_eq!(
        unknown.to_string(),
        "the tensor has DLPack version 9.9; request version 1 from its producer"
    );
}

#[test]
fn a_tensor_that_was_taken_in_is_not_taken_again() {
    let mut bytes = vec![0_u8; 64];
    let fields = Fields::over(&mut bytes, &[2, 3]);
    let deleted = Deleted::default();
    let tensor = fields.versioned(&deleted);
    // SAFETY: the test owns the tensor.
    let first = unsafe { Importer::new().versioned(tensor) }.unwrap();
    // SAFETY: it was passed before and is alive, which the importer detects.
    let again = unsafe { Importer::new().versioned(tensor) }.unwrap_err();
    assert!(matches!(again, ImportError::AlreadyImported { address } if address == tensor.addr()));
    // SAFETY: as above; its structure is not read.
    let again = unsafe { Importer::new().legacy(tensor.cast()) }.unwrap_err();
    assert!(matches!(again, ImportError::AlreadyImported { .. }) && !again.was_released());
    assert_eq!(deleted.count(), 0);
    drop(first);
    assert_eq!(deleted.count(), 1);
}

#[test]
fn a_tensor_without_a_deleter_may_come_again() {
    let mut bytes = vec![0_u8; 64];
    let fields = Fields { has_deleter: false, ..Fields::over(&mut bytes, &[2, 3]) };
    let tensor = fields.versioned(&Deleted::default());
    for _ in 0..2 {
        // SAFETY: only the test releases it.
        let taken = unsafe { Importer::new().versioned(tensor) }.unwrap();
        // SAFETY: as above.
        assert!(unsafe { Importer::new().versioned(tensor) }.unwrap().shape() == taken.shape());
    }
    // SAFETY: no code has it any more.
    unsafe { reclaim(tensor) };
}

#[test]
fn legacy_tensors_cannot_say_that_they_are_padded() {
    let mut bytes = vec![0_u8; 64];
    let deleted = Deleted::default();
    // FP4 elements, each in a byte of its own.
    let fields = Fields { flags: 4, dtype: (17, 4, 1), ..Fields::over(&mut bytes, &[6]) };
    // SAFETY: the test owns the tensor, and no other code uses its bytes.
    let tensor = unsafe { Importer::new().versioned(fields.versioned(&deleted)) }.unwrap();
    assert!(tensor.shape().is_padded());
    let region = Region::new(tensor.memory().unwrap());
    // SAFETY: as above.
    let export = unsafe { TensorExport::new(region, tensor.shape().clone()) }.unwrap();
    let refused = export.into_legacy().unwrap_err();
    assert!(matches!(refused, ExportError::LegacyPadded { .. }), "{refused}");
    drop(tensor);
    assert_eq!(deleted.count(), 1);
}

#[test]
fn invalid_pointers_are_not_dereferenced() {
    let importer = Importer::new();
    // SAFETY: null and misaligned pointers may be passed.
    let null = unsafe { importer.versioned(std::ptr::null_mut()) }.unwrap_err();
    assert!(matches!(null, ImportError::NullTensor) && !null.was_released());
    // SAFETY: as above.
    let odd = unsafe { importer.legacy(std::ptr::without_provenance_mut(0x1001)) }.unwrap_err();
    assert!(matches!(odd, ImportError::MisalignedTensor { address: 0x1001 }));
    assert!(!odd.was_released());
}
