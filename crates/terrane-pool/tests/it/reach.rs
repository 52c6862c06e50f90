//! What memory says of itself, its wrappers say, too.

use terrane_core::{Allocate, ByteCount, Memory, RegionRequest};
use terrane_pool::adaptors::{Budget, Delayed, Either, Guard};
use terrane_pool::managed::{ManagerOptions, MemoryManager};
use terrane_pool::{Pool, PoolOptions};

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
    check("a block of a pool", &pool.acquire(request.bytes).unwrap());
    check("a managed block", &manager.allocate(&request).unwrap());
    check("a guarded block", &Guard::new(heap.clone()).allocate(&request).unwrap());
    check("a block that is freed late", &Delayed::new(heap.clone(), 1).allocate(&request).unwrap());
    let either: Either<_, HeapMemory> = Either::First(heap.allocate(&request).unwrap());
    check("one of two", &either);
}
