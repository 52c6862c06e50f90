//! Swaps between device memory and host memory. candle's tensors on a device are such pointers.

use std::collections::HashMap;

use terrane::core::{BoxedCause, DeviceAddress, HostAddress, Location, RegionRequest};
use terrane::interop::tensors::StridedTensor;
use terrane::prelude::*;
use terrane::transfer::Side;
use terrane_testkit::pattern::PieceAccess;
use terrane_testkit::random::Seeded;

use crate::block_copy::{SwapError, copy_blocks};
use crate::needs::{LITTLE, OnDevice, device, two_devices};

/// A tensor `[blocks, 3, 40]` of two-byte elements. Rows have gaps of 8 elements.
struct Cache {
    tensor: StridedTensor,
    memory: Region,
    blocks: usize,
    access: OnDevice,
}

const ROWS: usize = 3;
const ROW: usize = 80;
const ROW_STRIDE: usize = 96;
const BLOCK: usize = ROWS * ROW_STRIDE;

impl Cache {
    fn new(context: &Context, memory: Region, blocks: usize, seed: u64) -> Self {
        // An engine has the address as a number only.
        let at = match memory.location() {
            Location::Device { device, address } => {
                Location::Device { device, address: DeviceAddress::new(address.get()) }
            }
            Location::Host(address) => {
                Location::Host(HostAddress::new(std::ptr::NonNull::new(address.as_ptr()).unwrap()))
            }
            other => panic!("{other}"),
        };
        let strides = [BLOCK / 2, ROW_STRIDE / 2, 1];
        let (sizes, kind) = ([blocks, ROWS, ROW / 2], memory.kind());
        // SAFETY: the region keeps the memory. The tests use it when no copy runs.
        let tensor =
            unsafe { StridedTensor::from_raw((kind, at), 2, sizes, strides, memory.clone()) };
        let access = OnDevice::new(context);
        let cache = Self { tensor: tensor.unwrap(), memory, blocks, access };
        let mut random = Seeded::new(seed);
        let bytes: Vec<u8> =
            (0..blocks * BLOCK).map(|_| random.next_u64().to_le_bytes()[0]).collect();
        // SAFETY: the region has so many bytes, and nothing else uses them.
        unsafe { cache.access.write(cache.memory.location(), &bytes) }.unwrap();
        cache
    }

    fn on_device(context: &Context, blocks: usize, seed: u64) -> Self {
        let allocator = DeviceAllocator::new(context);
        let memory = allocator.allocate(&request(blocks)).unwrap();
        Self::new(context, Region::new(memory), blocks, seed)
    }

    fn pinned(context: &Context, blocks: usize, seed: u64) -> Self {
        let allocator = PinnedAllocator::new(context, PinnedOptions::default()).unwrap();
        let memory = allocator.allocate(&request(blocks)).unwrap();
        Self::new(context, Region::new(memory), blocks, seed)
    }

    /// Like a tensor of candle on the CPU.
    fn pageable(context: &Context, blocks: usize, seed: u64) -> Self {
        let allocator = SystemAllocator::new(SystemOptions::default());
        let memory = allocator.allocate(&request(blocks)).unwrap();
        Self::new(context, Region::new(memory), blocks, seed)
    }

    /// All bytes, with the gaps.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.blocks * BLOCK];
        let read = |bytes: &mut [u8]| -> Result<(), BoxedCause> {
            // SAFETY: the region has so many bytes, and nothing writes them.
            unsafe { self.access.read(self.memory.location(), bytes) }
        };
        read(&mut bytes).unwrap();
        bytes
    }
}

fn request(blocks: usize) -> RegionRequest {
    RegionRequest::new(ByteCount::from_usize(blocks * BLOCK))
}

/// Swaps, and compares every byte of both tensors with a plain copy. Gaps stay.
fn swap(
    manager: &TransferManager,
    (from, to): (&Cache, &Cache),
    mapping: &HashMap<usize, usize>,
    order: DeviceOrder,
) {
    let (source, mut expected) = (from.bytes(), to.bytes());
    for (&block, &destination) in mapping {
        for row in 0..ROWS {
            let (at, to) =
                (block * BLOCK + row * ROW_STRIDE, destination * BLOCK + row * ROW_STRIDE);
            expected[to..to + ROW].copy_from_slice(&source[at..at + ROW]);
        }
    }
    let copy = copy_blocks(manager, &from.tensor, &to.tensor, mapping, Some(order)).unwrap();
    copy.wait().result.unwrap();
    assert!(to.bytes() == expected, "{:?} to {:?}", from.memory.kind(), to.memory.kind());
    assert!(from.bytes() == source);
}

#[test]
fn blocks_are_swapped_between_a_device_and_the_host() {
    let test = "swap_blocks::blocks_are_swapped_between_a_device_and_the_host";
    let Some(context) = device(test, LITTLE) else { return };
    let manager = TransferManager::builder().devices([&context]).unwrap().build();
    let stream = Stream::new(&context).unwrap();
    let computing = Cache::on_device(&context, 40, 1);
    let second = Cache::on_device(&context, 24, 2);
    let out: HashMap<usize, usize> = (0..16).map(|block| ((block * 7) % 40, 15 - block)).collect();
    let back: HashMap<usize, usize> = (0..16).map(|block| (block, block * 2)).collect();
    for host in [Cache::pinned(&context, 16, 3), Cache::pageable(&context, 16, 4)] {
        swap(&manager, (&computing, &host), &out, stream.order());
        swap(&manager, (&host, &computing), &back, DeviceOrder::AlreadySynchronised);
        swap(&manager, (&host, &second), &HashMap::new(), stream.order());
    }
    swap(&manager, (&computing, &second), &out, stream.order());
    assert_eq!(context.lost(), None);
}

#[test]
fn blocks_are_swapped_between_two_devices() {
    let test = "swap_blocks::blocks_are_swapped_between_two_devices";
    let Some([context, peer]) = two_devices(test, LITTLE) else { return };
    let manager = TransferManager::builder().devices([&context, &peer]).unwrap().build();
    let (from, to) = (Cache::on_device(&context, 12, 1), Cache::on_device(&peer, 9, 2));
    let mapping = HashMap::from([(11, 0), (0, 8), (5, 4)]);
    let order = DeviceOrder::AlreadySynchronised;
    let copy = copy_blocks(&manager, &from.tensor, &to.tensor, &mapping, Some(order.clone()));
    if let Err(SwapError::Transfer(error @ TransferError::NoEngine { .. })) = &copy {
        return eprintln!("skipped: {test}: the devices cannot access each other: {error}");
    }
    copy.unwrap().wait().result.unwrap();
    swap(&manager, (&from, &to), &HashMap::from([(3, 3), (4, 1)]), order);
}

#[test]
fn hostile_swaps_with_a_device_are_typed_errors() {
    use SwapError as E;
    let test = "swap_blocks::hostile_swaps_with_a_device_are_typed_errors";
    let Some(context) = device(test, LITTLE) else { return };
    let manager = TransferManager::builder().devices([&context]).unwrap().build();
    let (from, to) = (Cache::on_device(&context, 4, 1), Cache::pinned(&context, 3, 2));
    let before = (from.bytes(), to.bytes());
    let refused = |mapping: &[(usize, usize)], order: Option<DeviceOrder>| {
        let mapping: HashMap<usize, usize> = mapping.iter().copied().collect();
        copy_blocks(&manager, &from.tensor, &to.tensor, &mapping, order).unwrap_err()
    };
    let order = || Some(DeviceOrder::AlreadySynchronised);
    for (mapping, expected) in
        [([(4, 0), (0, 1)], (Side::Source, 4)), ([(1, 0), (0, 3)], (Side::Destination, 3))]
    {
        let error = refused(&mapping, order());
        let E::Transfer(TransferError::NoSuchBlock { side, block, .. }) = error else {
            panic!("{error}")
        };
        assert_eq!((side, block), expected);
    }
    let error = refused(&[(1, 0), (2, 0)], order());
    assert!(matches!(error, E::Transfer(TransferError::DuplicateDestination { block: 0 })));
    let error = refused(&[(1, 0)], None);
    assert!(matches!(error, E::Transfer(TransferError::OrderNotStated { side: Side::Source, .. })));
    assert!(matches!(refused(&[(usize::MAX, 0)], order()), E::BlockNumber { .. }));
    assert!((from.bytes(), to.bytes()) == before);
    swap(&manager, (&from, &to), &HashMap::from([(3, 2)]), DeviceOrder::AlreadySynchronised);
}

/// The blocks are written by work that a stream has not run yet.
#[test]
fn a_swap_runs_after_the_work_of_its_stream() {
    let test = "swap_blocks::a_swap_runs_after_the_work_of_its_stream";
    let Some(context) = device(test, LITTLE) else { return };
    let manager = TransferManager::builder().devices([&context]).unwrap().build();
    let stream = Stream::new(&context).unwrap();
    let (from, to) = (Cache::on_device(&context, 8, 1), Cache::pinned(&context, 8, 2));
    let length = ByteCount::from_usize(8 * BLOCK);
    // SAFETY: the memory outlives the copy, and nothing else uses it.
    unsafe { stream.fill(from.memory.location(), 0x5A, length) }.unwrap();
    let mapping = HashMap::from([(7, 0), (0, 7)]);
    let copy = copy_blocks(&manager, &from.tensor, &to.tensor, &mapping, Some(stream.order()));
    copy.unwrap().wait().result.unwrap();
    let bytes = to.bytes();
    for block in [0, 7] {
        for row in 0..ROWS {
            let at = block * BLOCK + row * ROW_STRIDE;
            assert!(bytes[at..at + ROW].iter().all(|&byte| byte == 0x5A));
        }
    }
}
