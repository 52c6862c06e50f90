//! The unit of a request: the length of the blocks that the region is divided into.

use std::sync::{Arc, Mutex};

use terrane_core::{Allocate, AllocateError, ByteCount, Limits, RegionRequest, StorageKind};
use terrane_pool::adaptors::{Adapt, Budget};
use terrane_pool::{Pool, PoolOptions, SizeClasses};
use terrane_testkit::memory::HeapAllocator;

/// The units of the requests.
#[derive(Clone, Default)]
struct Asked(Arc<Mutex<Vec<ByteCount>>>);

impl Asked {
    fn taken(&self) -> Vec<ByteCount> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

// SAFETY: the memory is the heap's.
unsafe impl Allocate for Asked {
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
    let asked = Asked::default();
    let kib = ByteCount::kib;
    let classes = SizeClasses::PowerOfTwo;
    let options = PoolOptions { classes, largest_class: kib(64), ..PoolOptions::default() };
    let pool = Pool::new(asked.clone(), options).unwrap();
    let request = |bytes| RegionRequest::new(bytes).in_units_of(kib(3));
    drop([pool.allocate(&request(kib(30))).unwrap(), pool.allocate(&request(kib(300))).unwrap()]);
    assert_eq!(asked.taken(), [kib(32), kib(3)]);

    let classes = SizeClasses::ExactSlab { stride: kib(36), count: 4 };
    let options = PoolOptions { classes, ..PoolOptions::default() };
    let pool = Pool::new(asked.clone(), options).unwrap();
    drop(pool.allocate(&request(kib(36))).unwrap());
    assert_eq!(asked.taken(), [kib(36)], "of a slab of four");
}

#[test]
fn canaries_move_the_pieces_so_that_no_unit_is_named() {
    let asked = Asked::default();
    let request = RegionRequest::new(ByteCount::kib(30)).in_units_of(ByteCount::kib(3));
    drop(asked.clone().guarded().allocate(&request).unwrap());
    drop(
        asked.clone().limited(Budget::new("units", ByteCount::mib(1))).allocate(&request).unwrap(),
    );
    assert_eq!(asked.taken(), [ByteCount::ZERO, ByteCount::kib(3)]);
}
