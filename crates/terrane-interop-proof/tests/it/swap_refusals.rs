//! Swaps that are refused: the error names the reason, and no byte changes.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use terrane::interop::tensors::StridedError;
use terrane::layout::{GeometryError, LayoutError};
use terrane::prelude::*;
use terrane::transfer::Side;

use crate::block_copy::SwapError;
use crate::candle::{start_swap_blocks, swap_blocks, swap_blocks_with};
use crate::swap_space::SwapSpace;
use crate::tensors::{bits, numbered};

/// The error of a swap. Both tensors keep their elements, and a second swap of them succeeds.
fn refused(src: &Tensor, dst: &Tensor, mapping: &[(usize, usize)]) -> SwapError {
    let manager = TransferManager::with_default_engines().unwrap();
    let mapping: HashMap<usize, usize> = mapping.iter().copied().collect();
    let before = (bits(src), bits(dst));
    let error = swap_blocks_with(&manager, src, dst, &mapping).unwrap_err();
    // SAFETY: nothing is started.
    let other = unsafe { start_swap_blocks(&manager, src, dst, &mapping) }.unwrap_err();
    assert_eq!(error.to_string(), other.to_string());
    let of_candle = swap_blocks(src, dst, &mapping).unwrap_err().to_string();
    assert!(of_candle.contains(&error.to_string()), "{of_candle}");
    assert_eq!((bits(src), bits(dst)), before);
    error
}

fn f32s(sizes: &[usize]) -> Tensor {
    numbered(sizes, DType::F32, 1)
}

#[test]
fn hostile_mappings_are_typed_errors() {
    use SwapError as E;
    let (src, dst) = (f32s(&[4, 2, 8]), f32s(&[3, 2, 8]));
    let no_block = |error: SwapError, expected: (Side, u32, u32)| {
        let E::Transfer(TransferError::NoSuchBlock { side, block, num_blocks }) = error else {
            panic!("{error}")
        };
        assert_eq!((side, block, num_blocks), expected);
    };
    no_block(refused(&src, &dst, &[(0, 0), (4, 1)]), (Side::Source, 4, 4));
    no_block(refused(&src, &dst, &[(0, 0), (3, 3)]), (Side::Destination, 3, 3));
    let largest = usize::try_from(u32::MAX).unwrap();
    no_block(refused(&src, &dst, &[(largest, 0)]), (Side::Source, u32::MAX, 4));
    for block in [largest + 1, usize::MAX] {
        let error = refused(&src, &dst, &[(0, block)]);
        assert!(matches!(error, E::BlockNumber { block: found } if found == block), "{error}");
    }
    let error = refused(&src, &dst, &[(0, 2), (3, 2), (1, 0)]);
    let E::Transfer(TransferError::DuplicateDestination { block: 2 }) = error else {
        panic!("{error}")
    };
    // Within a tensor, no block may be read and written.
    let error = refused(&src, &src, &[(0, 1), (1, 2)]);
    assert!(matches!(error, E::Transfer(TransferError::Overlap { .. })), "{error}");

    swap_blocks(&src, &dst, &HashMap::new()).unwrap();
    assert_eq!(bits(&dst), bits(&f32s(&[3, 2, 8])));
}

#[test]
fn unequal_tensors_are_typed_errors() {
    use SwapError as E;
    let src = f32s(&[4, 2, 8]);
    // As many elements in a block, in another shape.
    for other in [&[4, 2, 9][..], &[4, 8, 2], &[4, 16], &[4, 1, 2, 8]] {
        let E::Shapes { from, to } = refused(&src, &f32s(other), &[(0, 0)]) else { panic!() };
        assert_eq!(from, [4, 2, 8]);
        assert_eq!(to.len(), other.len());
    }
    // As wide, and another type.
    let error = refused(&src, &numbered(&[4, 2, 8], DType::U32, 1), &[(0, 0)]);
    assert!(matches!(error, E::Types { from: "f32", to: "u32" }), "{error}");
    let scalar = Tensor::new(1_f32, &Device::Cpu).unwrap();
    assert!(matches!(refused(&scalar, &scalar.copy().unwrap(), &[(0, 0)]), E::NoBlocks));
}

#[test]
fn tensors_without_elements_are_typed_errors() {
    for (sizes, dimension) in [(&[0, 2, 8][..], 0), (&[4, 0, 8], 1), (&[4, 2, 0], 2)] {
        let empty = Tensor::zeros(sizes, DType::F32, &Device::Cpu).unwrap();
        let other = Tensor::zeros(sizes, DType::F32, &Device::Cpu).unwrap();
        let error = refused(&empty, &other, &[(0, 0)]);
        let SwapError::Tensor(StridedError::ZeroSize { dimension: found }) = error else {
            panic!("{error}")
        };
        assert_eq!(found, dimension);
    }
}

#[test]
fn elements_that_share_bytes_are_typed_errors() {
    let one = f32s(&[1, 1, 8]);
    let expanded = one.expand((4, 2, 8)).unwrap();
    for (src, dst) in [(&expanded, &f32s(&[4, 2, 8])), (&f32s(&[4, 2, 8]), &expanded)] {
        let error = refused(src, dst, &[(0, 0)]);
        let SwapError::Tensor(StridedError::Layout(LayoutError::Geometry(
            GeometryError::NotNested { .. },
        ))) = error
        else {
            panic!("{error}")
        };
    }
    // Blocks 0 to 3 and blocks 2 to 5 of one tensor.
    let whole = f32s(&[6, 8]);
    let views = [0, 2].map(|first| whole.narrow(0, first, 4).unwrap());
    let error = refused(&views[0], &views[1], &[(0, 3)]);
    assert!(matches!(error, SwapError::InUse(_)), "{error}");
}

#[test]
fn caches_that_differ_are_typed_errors() {
    use SwapError as E;
    let manager = TransferManager::with_default_engines().unwrap();
    let layer = |blocks| (f32s(&[blocks, 2, 8]), f32s(&[blocks, 8, 2]));
    // SAFETY: nothing is copied.
    let new = |computing: &[_], host: &[_]| unsafe { SwapSpace::new(&manager, computing, host) };
    let error = |computing: &[_], host: &[_]| new(computing, host).err().unwrap();
    assert!(matches!(error(&[], &[]), E::NoLayers));
    assert!(matches!(error(&[layer(4), layer(4)], &[layer(2)]), E::Shapes { .. }));
    let other = (f32s(&[2, 2, 8]), f32s(&[2, 8, 4]));
    assert!(matches!(error(&[layer(4)], &[other]), E::Shapes { .. }));
    let other = (numbered(&[2, 2, 8], DType::I64, 1), f32s(&[2, 8, 2]));
    assert!(matches!(error(&[layer(4)], &[other]), E::Types { from: "f32", to: "i64" }));
    let layers = [layer(4), layer(5)];
    let uneven = error(&layers, &[layer(2), layer(2)]);
    assert!(matches!(uneven, E::Tensor(StridedError::Differs { tensor: 1 })), "{uneven}");
    // One cache cannot belong to two spaces.
    let (computing, host) = ([layer(4)], [layer(2)]);
    let space = new(&computing, &host).unwrap();
    assert!(matches!(error(&computing, &[layer(2)]), E::InUse(_)));
    drop(space);
    new(&computing, &host).unwrap();
}
