//! A block cannot be released twice.

use terrane_core::{Allocate, ByteCount};
use terrane_pool::Pool;

fn release_twice<A: Allocate>(pool: &Pool<A>) {
    if let Ok(block) = pool.allocate_bytes(ByteCount::kib(4)) {
        drop(block);
        drop(block);
    }
}

fn main() {}
