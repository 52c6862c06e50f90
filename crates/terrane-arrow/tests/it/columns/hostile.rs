//! Columns from tensors with any shape, strides and element type. Each one is refused with a typed
//! error, or uses the tensor's own bytes.

use std::ptr;

use proptest::prelude::*;
use terrane_arrow::columns::{Column, ColumnError, Origin};
use terrane_interop::dlpack::ffi::{
    DLDataType, DLDevice, DLManagedTensorVersioned, DLPackVersion, DLTensor,
};
use terrane_interop::dlpack::{ImportedTensor, Importer};

/// Checks that the column has the tensor's bytes and a foreign origin, and is writable if the
/// tensor is.
fn check(tensor: &ImportedTensor) {
    let (shape, element) = (tensor.shape(), tensor.shape().element());
    match Column::from_tensor(tensor) {
        Ok(column) => {
            assert!(shape.is_dense() && element.width().is_some());
            let rows = shape.sizes().first().copied().unwrap_or(1);
            assert_eq!(i64::try_from(column.len()), Ok(rows));
            let mut leaf = &column;
            while let [child] = leaf.children() {
                leaf = child;
            }
            assert_eq!(leaf.len(), if rows == 0 { 0 } else { shape.elements() }, "{shape:?}");
            let [None, Some(values)] = leaf.buffers() else { panic!("{leaf:?}") };
            assert_eq!((values.span(), values.origin()), (tensor.span(), Origin::DlPack));
            assert_eq!(values.region().is_err(), tensor.is_read_only());
        }
        Err(ColumnError::Tensor { element: found, .. }) => assert_eq!(found, element),
        Err(ColumnError::WideRow { values }) => assert!(i32::try_from(values).is_err()),
        Err(ColumnError::Overflow(_) | ColumnError::TooMany { what: "rows", .. }) => {
            assert_eq!(shape.elements(), 0, "sizes around an empty one")
        }
        Err(other) => panic!("{other}"),
    }
}

/// The maximum number of sizes or strides that are read from a generated tensor.
const MOST: usize = 6;

fn any_axis() -> impl Strategy<Value = i64> {
    prop_oneof![8 => 0_i64..5, 1 => any::<i64>(), 1 => Just(i64::MAX), 1 => -3_i64..0]
}

/// A whole element, a part of a byte, or a random type.
fn any_element() -> impl Strategy<Value = (u8, u8, u16)> {
    prop_oneof![
        4 => Just((4, 16, 1)),
        4 => (0_u8..3, prop_oneof![Just(8_u8), Just(16), Just(32), Just(64)], Just(1_u16)),
        1 => Just((6, 8, 1)),
        1 => Just((17, 4, 2)),
        1 => any::<(u8, u8, u16)>(),
    ]
}

/// The strides of a compact tensor.
fn strides_of(sizes: &[i64]) -> Vec<i64> {
    let mut strides = vec![1_i64; sizes.len()];
    for axis in (1..sizes.len()).rev() {
        strides[axis - 1] = strides[axis].wrapping_mul(sizes[axis]);
    }
    strides
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn tensors_of_any_shape_are_columns_or_refused(
        sizes in prop::collection::vec(any_axis(), 0..MOST),
        other in prop::collection::vec(any_axis(), MOST),
        is_compact in prop_oneof![3 => Just(true), 1 => Just(false)],
        element in any_element(),
        flags in prop_oneof![2 => Just(0_u64), 1 => Just(1), 1 => any::<u64>()],
    ) {
        let mut sizes = sizes;
        let mut strides = if is_compact { strides_of(&sizes) } else { other };
        let (code, bits, lanes) = element;
        let mut structure = DLManagedTensorVersioned {
            version: DLPackVersion { major: 1, minor: 0 },
            manager_ctx: ptr::null_mut(),
            deleter: None,
            flags,
            dl_tensor: DLTensor {
                data: ptr::without_provenance_mut(0x1000),
                device: DLDevice { device_type: 1, device_id: 0 },
                ndim: i32::try_from(sizes.len()).unwrap(),
                dtype: DLDataType { code, bits, lanes },
                shape: sizes.as_mut_ptr(),
                strides: strides.as_mut_ptr(),
                byte_offset: 0,
            },
        };
        // SAFETY: the axes are readable, and the data is not accessed.
        if let Ok(tensor) = unsafe { Importer::new().versioned(&raw mut structure) } {
            check(&tensor);
        }
    }
}
