//! Registered memory gives shared references only, so it cannot be swapped.

use terrane_core::{Memory, Registered};

fn wrong<M: Memory>(mut registered: Registered<M>, other: &mut M) {
    std::mem::swap(registered.memory(), other);
    std::mem::swap(&mut registered.memory, other);
    std::mem::swap(&mut *registered, other);
    std::mem::swap(registered.memory_mut(), other);
}

fn main() {}
