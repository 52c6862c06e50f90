//! A block knows where it goes: there is nothing to release it to.

use terrane_core::Allocate;
use terrane_pool::{Pool, PoolBlock};

fn release_elsewhere<A: Allocate>(other: &Pool<A>, block: PoolBlock<A::Memory>) {
    other.release(block);
}

fn main() {}
