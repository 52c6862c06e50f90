//! A registration ends once, and has one owner, who holds its memory.

use terrane_core::{Memory, Registered};

fn twice<T: Clone>(_: T) {}

fn wrong<M: Memory + Clone>(registered: Registered<M>) {
    twice(registered);
}

fn main() {}
