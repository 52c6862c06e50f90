//! Wrappers report the same values as the memory that they wrap.

use terrane_core::{Allocate, ByteCount, Memory, Region, RegionRequest};
use terrane_pool::adaptors::{Budget, Either, Guard};
use terrane_pool::managed::{ManagedBlock, ManagerOptions, MemoryManager};
use terrane_pool::{Pool, PoolOptions};
use terrane_testkit::delayed::Delayed;

use crate::heap::{Heap, HeapMemory, to_end_of_stretch};

#[track_caller]
fn check(what: &str, memory: &impl Memory) {
    for offset in [0, 1, 999, 3000, memory.length().get() - 1].map(ByteCount::new) {
        let left = memory.length().checked_sub(offset).unwrap();
        let expected = to_end_of_stretch(memory.location(), offset).min(left);
        assert_eq!(memory.copyable_from(offset), Some(expected), "{what} from {offset} on");
    }
}

#[test]
fn wrappers_say_how_far_a_copy_may_reach() {
    let request = RegionRequest::new(ByteCount::new(5000));
    let heap = Heap::new(ByteCount::mib(8));
    let (pool, options) =
        (Pool::new(heap.clone(), PoolOptions::default()).unwrap(), ManagerOptions::default());
    let manager = MemoryManager::new(heap.clone(), Budget::new("all", ByteCount::mib(8)), options);
    check("the memory itself", &heap.allocate(&request).unwrap());
    check("a block of a pool", &pool.allocate_bytes(request.bytes).unwrap());
    check("a managed block", &manager.allocate(&request).unwrap());
    check("a guarded block", &Guard::new(heap.clone()).allocate(&request).unwrap());
    check("a block that is freed late", &Delayed::new(heap.clone(), 1).allocate(&request).unwrap());
    let either: Either<_, HeapMemory> = Either::First(heap.allocate(&request).unwrap());
    check("either of two", &either);
}

#[test]
fn wrappers_name_the_managed_block_that_they_are_a_part_of() {
    let request = RegionRequest::new(ByteCount::new(5000));
    let heap = Heap::new(ByteCount::mib(8));
    let budget = || Budget::new("all", ByteCount::mib(8));
    let manager = MemoryManager::new(heap.clone(), budget(), ManagerOptions::default());
    let block = manager.allocate(&request).unwrap();
    let handle = block.handle();
    let named = |memory: &dyn Memory| ManagedBlock::of(memory).map(ManagedBlock::handle);
    assert_eq!(named(&block), Some(handle));
    let identity = ManagedBlock::of(&block).unwrap().identity();
    assert_eq!(identity, Some(manager.identity(handle).unwrap()));
    let either: Either<_, HeapMemory> = Either::First(block);
    assert_eq!(named(&either), Some(handle));
    let region = Region::new(Box::new(either));
    let part = region.view(ByteCount::new(100), ByteCount::new(10)).unwrap();
    assert_eq!(named(&part), Some(handle));

    assert!(named(&Guard::new(&manager).allocate(&request).unwrap()).is_some());
    assert!(named(&Delayed::new(&manager, 1).allocate(&request).unwrap()).is_some());
    // A pool allocates its blocks to several users, while the managed block below stays the same.
    let pool = Pool::new(&manager, PoolOptions::default()).unwrap();
    assert_eq!(named(&pool.allocate_bytes(request.bytes).unwrap()), None);
    assert_eq!(named(&heap.allocate(&request).unwrap()), None);
}
