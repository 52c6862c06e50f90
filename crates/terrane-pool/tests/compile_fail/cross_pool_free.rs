//! A block returns to its own pool: no method releases it to another.

use terrane_core::Allocate;
use terrane_pool::{Pool, PoolBlock};

fn release_elsewhere<A: Allocate>(other: &Pool<A>, block: PoolBlock<A::Memory>) {
    other.release(block);
}

fn main() {}
