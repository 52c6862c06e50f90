//! Swaps between tensors of candle: every element is that of a plain copy.

use std::collections::HashMap;
use std::sync::Barrier;

use candle_core::{DType, Device, Tensor};
use terrane::prelude::*;
use terrane_testkit::random::Seeded;

use crate::block_on::block_on;
use crate::candle::{start_swap_blocks, swap_blocks, swap_blocks_with};
use crate::swap_space::{KvCache, SwapSpace};
use crate::tensors::{bits, numbered, swapped};

fn manager() -> TransferManager {
    TransferManager::with_default_engines().unwrap()
}

#[test]
fn every_type_and_shape_is_swapped_bit_by_bit() {
    let types = [
        DType::U8,
        DType::U32,
        DType::I64,
        DType::BF16,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::F8E4M3,
    ];
    // Keys and values of paged attention, a flash cache, a latent, and the smallest ones.
    let shapes: [&[usize]; 6] = [&[2, 2, 4, 8], &[2, 16, 4], &[4, 2, 16], &[4, 1, 24], &[7], &[]];
    for dtype in types {
        for (number, shape) in (0..).zip(shapes) {
            let sizes = |blocks: usize| [&[blocks], shape].concat();
            let src = numbered(&sizes(9), dtype, number);
            let dst = numbered(&sizes(5), dtype, 31 + number);
            let mapping = HashMap::from([(8, 0), (0, 4), (3, 2), (4, 3)]);
            let (before, expected) = (bits(&src), swapped(&src, &dst, &mapping));
            swap_blocks(&src, &dst, &mapping).unwrap();
            assert_eq!(bits(&dst), expected, "{dtype:?} {shape:?}");
            assert_eq!(bits(&src), before);
        }
    }
}

#[test]
fn random_mappings_there_and_back() {
    let mut random = Seeded::new(7);
    let manager = manager();
    let (computing, host) =
        (numbered(&[40, 3, 64], DType::BF16, 1), numbered(&[23, 3, 64], DType::BF16, 2));
    for _ in 0..50 {
        let count = random.below(24);
        let distinct = |random: &mut Seeded, most: usize| -> Vec<usize> {
            let mut all: Vec<usize> = (0..most).collect();
            random.shuffle(&mut all);
            all.truncate(count);
            all
        };
        let (from, to) = (distinct(&mut random, 40), distinct(&mut random, 23));
        let out: HashMap<usize, usize> = from.iter().copied().zip(to.iter().copied()).collect();
        let expected = swapped(&computing, &host, &out);
        swap_blocks_with(&manager, &computing, &host, &out).unwrap();
        assert_eq!(bits(&host), expected);
        let back: HashMap<usize, usize> = to.iter().copied().zip(from).collect();
        let expected = bits(&computing);
        swap_blocks_with(&manager, &host, &computing, &back).unwrap();
        assert_eq!(bits(&computing), expected, "the blocks come back to their places");
    }
}

/// The elements of a view have strides and an offset. The other elements of its storage stay.
#[test]
fn views_are_swapped_and_their_surroundings_stay() {
    type View = fn(&Tensor) -> candle_core::Result<Tensor>;
    let views: [View; 6] = [
        |tensor| Ok(tensor.clone()),
        |tensor| tensor.narrow(0, 1, 4),
        |tensor| tensor.narrow(1, 1, 2)?.narrow(0, 2, 4),
        |tensor| tensor.narrow(2, 2, 3),
        |tensor| tensor.transpose(1, 2),
        |tensor| tensor.narrow(1, 0, 2)?.transpose(0, 1)?.transpose(0, 1),
    ];
    for (number, view) in (0..).zip(views) {
        let whole = numbered(&[6, 4, 8], DType::F32, number);
        let src = view(&numbered(&[6, 4, 8], DType::F32, 50 + number)).unwrap();
        let dst = view(&whole).unwrap();
        // The position of each element of the view in the storage.
        let positions = Tensor::arange(0_u32, 6 * 4 * 8, &Device::Cpu).unwrap();
        let positions = bits(&view(&positions.reshape((6, 4, 8)).unwrap()).unwrap());
        let mapping = HashMap::from([(0, 3), (3, 1), (2, 0)]);
        let mut expected = bits(&whole);
        for (at, element) in positions.iter().zip(swapped(&src, &dst, &mapping)) {
            expected[usize::try_from(*at).unwrap()] = element;
        }
        swap_blocks(&src, &dst, &mapping).unwrap();
        assert_eq!(bits(&whole), expected, "view {number}");
    }
}

#[test]
fn blocks_are_copied_within_a_tensor_and_between_its_views() {
    let tensor = numbered(&[8, 4, 16], DType::F16, 3);
    let mapping = HashMap::from([(0, 5), (1, 7), (2, 6)]);
    let expected = swapped(&tensor, &tensor, &mapping);
    swap_blocks(&tensor, &tensor.clone(), &mapping).unwrap();
    assert_eq!(bits(&tensor), expected);

    let (low, high) = (tensor.narrow(0, 0, 4).unwrap(), tensor.narrow(0, 4, 4).unwrap());
    let expected = swapped(&low, &high, &HashMap::from([(3, 0)]));
    swap_blocks(&low, &high, &HashMap::from([(3, 0)])).unwrap();
    assert_eq!(bits(&high), expected);
}

/// Each swap locks both storages. Whatever the directions, no two threads wait for each other.
#[test]
fn threads_swap_in_opposite_directions() {
    let manager = manager();
    let [a, b] = [1, 2].map(|seed| numbered(&[64, 64], DType::F32, seed));
    let (expected_a, expected_b) = (bits(&a), bits(&b));
    // The upper halves travel to the other tensor's lower halves.
    let mapping: HashMap<usize, usize> = (32..64).map(|block| (block, block - 32)).collect();
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        for (from, to) in [(&a, &b), (&b, &a)] {
            scope.spawn(|| {
                start.wait();
                for _ in 0..300 {
                    swap_blocks_with(&manager, from, to, &mapping).unwrap();
                }
            });
        }
    });
    let half = expected_a.len() / 2;
    assert_eq!(bits(&a), [&expected_b[half..], &expected_a[half..]].concat());
    assert_eq!(bits(&b), [&expected_a[half..], &expected_b[half..]].concat());
}

/// A tensor belongs to one swap at a time, so the others wait.
#[test]
fn threads_swap_out_of_one_tensor() {
    let manager = manager();
    let src = numbered(&[32, 256], DType::F32, 1);
    let destinations = [2, 3, 4].map(|seed| numbered(&[32, 256], DType::F32, seed));
    let mapping: HashMap<usize, usize> = (0..32).map(|block| (block, 31 - block)).collect();
    let expected = swapped(&src, &destinations[0], &mapping);
    let start = Barrier::new(destinations.len());
    std::thread::scope(|scope| {
        for destination in &destinations {
            scope.spawn(|| {
                start.wait();
                for _ in 0..100 {
                    swap_blocks_with(&manager, &src, destination, &mapping).unwrap();
                }
            });
        }
    });
    destinations.iter().for_each(|destination| assert_eq!(bits(destination), expected));
}

#[test]
fn a_started_swap_keeps_its_tensors_and_is_awaited() {
    let manager = manager();
    let (src, dst) = (numbered(&[16, 4096], DType::F32, 1), numbered(&[16, 4096], DType::F32, 2));
    let mapping: HashMap<usize, usize> = (0..16).map(|block| (block, 15 - block)).collect();
    let expected = swapped(&src, &dst, &mapping);
    let same = dst.clone();
    // SAFETY: nothing uses the tensors before the copy has ended.
    let copy = unsafe { start_swap_blocks(&manager, &src, &dst, &mapping) }.unwrap();
    drop((src, dst));
    let report = block_on(async { copy.await }).result.unwrap();
    assert_eq!(report.explanation.bytes, ByteCount::from_usize(16 * 4096 * 4));
    assert_eq!(bits(&same), expected);
}

#[test]
fn all_layers_are_swapped_by_one_transfer() {
    let caches = |blocks: usize, seed: u32| -> Vec<KvCache> {
        let tensors = |layer: u32| {
            let keys = numbered(&[blocks, 2, 4, 4, 8], DType::BF16, seed + 2 * layer);
            (keys, numbered(&[blocks, 2, 32, 4], DType::BF16, seed + 2 * layer + 1))
        };
        (0..5).map(tensors).collect()
    };
    let (computing, host) = (caches(12, 0), caches(4, 70));
    let manager = manager();
    // SAFETY: this test uses the tensors when no swap runs.
    let space = unsafe { SwapSpace::new(&manager, &computing, &host) }.unwrap();
    for (from, to, mapping, swaps_out) in [
        (&computing, &host, HashMap::from([(11, 0), (0, 3), (5, 1)]), true),
        (&host, &computing, HashMap::from([(0, 2), (3, 4), (1, 11)]), false),
        (&host, &computing, HashMap::new(), false),
    ] {
        let expected: Vec<[Vec<u64>; 2]> = from
            .iter()
            .zip(to)
            .map(|(from, to)| {
                [swapped(&from.0, &to.0, &mapping), swapped(&from.1, &to.1, &mapping)]
            })
            .collect();
        let report = if swaps_out { space.swap_out(&mapping) } else { space.swap_in(&mapping) };
        let bytes = mapping.len() * 5 * 2 * 2 * 4 * 4 * 8 * 2;
        assert_eq!(report.unwrap().explanation.bytes, ByteCount::from_usize(bytes));
        for ((keys, values), [expected_keys, expected_values]) in to.iter().zip(&expected) {
            assert_eq!(&bits(keys), expected_keys);
            assert_eq!(&bits(values), expected_values);
        }
    }
    // A refused swap copies nothing, and the space works afterwards.
    let refused = space.swap_in(&HashMap::from([(4, 0)])).unwrap_err();
    assert!(refused.to_string().contains("source block 4 does not exist"), "{refused}");
    space.swap_in(&HashMap::from([(3, 0)])).unwrap();
}
