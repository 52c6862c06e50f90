//! Tensors of candle with known bits.

use std::collections::HashMap;

use candle_core::{CpuStorage, DType, Device, Storage, Tensor};

/// A contiguous tensor whose elements follow from `seed`.
pub fn numbered(sizes: &[usize], dtype: DType, seed: u32) -> Tensor {
    let elements: usize = sizes.iter().product();
    let number = |at: u32| (at.wrapping_mul(2_654_435_761).wrapping_add(seed * 97) >> 7) % 113;
    let numbers: Vec<u32> = (0..u32::try_from(elements).unwrap()).map(number).collect();
    Tensor::from_vec(numbers, sizes, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// The bits of each element, in the order of the indices.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    // `contiguous` may return a view, which has an offset.
    let tensor = tensor.contiguous().unwrap();
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { panic!("{:?}", tensor.device()) };
    let bits: Vec<u64> = match storage {
        CpuStorage::U8(all) => all.iter().map(|&each| each.into()).collect(),
        CpuStorage::U32(all) => all.iter().map(|&each| each.into()).collect(),
        CpuStorage::I64(all) => all.iter().map(|each| each.cast_unsigned()).collect(),
        CpuStorage::BF16(all) => all.iter().map(|each| each.to_bits().into()).collect(),
        CpuStorage::F16(all) => all.iter().map(|each| each.to_bits().into()).collect(),
        CpuStorage::F32(all) => all.iter().map(|each| each.to_bits().into()).collect(),
        CpuStorage::F64(all) => all.iter().map(|each| each.to_bits()).collect(),
        CpuStorage::F8E4M3(all) => all.iter().map(|each| each.to_bits().into()).collect(),
        _ => panic!("{:?}", tensor.dtype()),
    };
    let start = layout.start_offset();
    bits[start..start + layout.shape().elem_count()].to_vec()
}

/// The bits of `dst` after its blocks of the mapping were replaced by those of `src`.
pub fn swapped(src: &Tensor, dst: &Tensor, mapping: &HashMap<usize, usize>) -> Vec<u64> {
    let (from, mut to) = (bits(src), bits(dst));
    let block = from.len() / src.dim(0).unwrap();
    for (&source, &destination) in mapping {
        let (source, destination) = (source * block, destination * block);
        to[destination..destination + block].copy_from_slice(&from[source..source + block]);
    }
    to
}
