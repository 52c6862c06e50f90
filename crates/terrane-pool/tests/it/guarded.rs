//! Guard and poison over real memory.

use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};
use terrane_pool::adaptors::{Guard, GuardViolation, Poison, Side};

use crate::heap::Heap;

fn heap() -> Heap {
    Heap::new(ByteCount::mib(1))
}

fn address(memory: &impl Memory) -> *mut u8 {
    let Location::Host(address) = memory.location() else {
        panic!("{} is not the host's", memory.location())
    };
    address.as_ptr()
}

#[test]
fn writes_out_of_bounds_are_found_on_both_sides_with_their_distance() {
    let guard = Guard::new(heap());
    let request = RegionRequest::new(ByteCount::new(64)).labelled("kv");
    let block = guard.allocate(&request).unwrap();
    assert_eq!(guard.verify(), 0);

    // SAFETY: within the memory that the guard obtained, around the block.
    unsafe { address(&block).wrapping_add(64).write(0) };
    assert_eq!(guard.verify(), 1);
    // SAFETY: as above.
    unsafe { address(&block).wrapping_sub(9).write(0) };
    drop(block);
    let found: Vec<_> = guard
        .log()
        .violations()
        .into_iter()
        .map(|violation| match violation {
            GuardViolation::Overwritten { label, side, distance, .. } => {
                assert_eq!(label.as_str(), "kv");
                (side, distance)
            }
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(found, [(Side::After, 0), (Side::Before, 8), (Side::After, 0)]);
}

#[test]
fn writes_within_bounds_are_not_found() {
    let guard = Guard::new(heap());
    for bytes in [8, 64, 4096, 5000] {
        let block = guard.allocate(&RegionRequest::new(ByteCount::new(bytes))).unwrap();
        // SAFETY: the whole of the block, which nobody else has.
        unsafe { address(&block).write_bytes(0, block.length().to_usize()) };
    }
    assert_eq!(guard.log().found(), 0);
}

#[test]
fn memory_is_poisoned_when_new_and_when_freed() {
    let heap = heap();
    // It keeps the memory long enough to look at what poison left behind.
    let delayed = terrane_pool::adaptors::Delayed::new(heap.clone(), 1);
    let poison = Poison::on_host(&delayed);
    let block = poison.allocate(&RegionRequest::new(ByteCount::new(16))).unwrap();
    let pointer = address(&block);
    // SAFETY: the block is live, and initialised.
    assert_eq!(unsafe { pointer.cast::<[u8; 16]>().read() }, [0xFF; 16]);
    drop(block);
    // SAFETY: the delayed upstream still holds the block.
    assert_eq!(unsafe { pointer.cast::<[u8; 16]>().read() }, [0xDE; 16]);
    assert_eq!((poison.report().filled, poison.report().failed), (2, 0));
    drop(poison);
    drop(delayed);
    assert_eq!(heap.live_blocks(), 0);
}
