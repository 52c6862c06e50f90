//! The unit of a request: the length of the blocks in the region.

use std::sync::{Arc, Mutex};

use terrane_core::{Allocate, AllocateError, ByteCount, Limits, RegionRequest, StorageKind};
use terrane_pool::adaptors::{Adapt, Budget};
use terrane_pool::{Pool, PoolOptions, SizeClasses};
use terrane_testkit::memory::HeapAllocator;

/// The units of the requests.
#[derive(Clone, Default)]
struct RecordingUpstream(Arc<Mutex<Vec<ByteCount>>>);

impl RecordingUpstream {
    fn take_units(&self) -> Vec<ByteCount> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

// SAFETY: the memory is the heap's.
unsafe impl Allocate for RecordingUpstream {
    type Memory = <HeapAllocator as Allocate>::Memory;

    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        self.0.lock().unwrap().push(request.unit);
        HeapAllocator::system().allocate(request)
    }
}

#[test]
fn a_pool_names_the_size_of_its_blocks_and_what_it_passes_on_keeps_its_unit() {
    let upstream = RecordingUpstream::default();
    let kib = ByteCount::kib;
    let classes = SizeClasses::PowerOfTwo;
    let options = PoolOptions { classes, largest_class: kib(64), ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    let request = |bytes| RegionRequest::new(bytes).in_units_of(kib(3));
    drop([pool.allocate(&request(kib(30))).unwrap(), pool.allocate(&request(kib(300))).unwrap()]);
    assert_eq!(upstream.take_units(), [kib(32), kib(3)]);

    let classes = SizeClasses::ExactSlab { stride: kib(36), count: 4 };
    let options = PoolOptions { classes, ..PoolOptions::default() };
    let pool = Pool::new(upstream.clone(), options).unwrap();
    drop(pool.allocate(&request(kib(36))).unwrap());
    assert_eq!(upstream.take_units(), [kib(36)], "of a slab of four");
}

#[test]
fn canaries_move_the_pieces_so_that_no_unit_is_named() {
    let upstream = RecordingUpstream::default();
    let request = RegionRequest::new(ByteCount::kib(30)).in_units_of(ByteCount::kib(3));
    drop(upstream.clone().guarded().allocate(&request).unwrap());
    drop(
        upstream
            .clone()
            .limited(Budget::new("units", ByteCount::mib(1)))
            .allocate(&request)
            .unwrap(),
    );
    assert_eq!(upstream.take_units(), [ByteCount::ZERO, ByteCount::kib(3)]);
}
