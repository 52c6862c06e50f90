//! A registered memory cannot be cloned, because it has one registration.

use terrane_core::{Memory, Registered};

fn twice<T: Clone>(_: T) {}

fn wrong<M: Memory + Clone>(registered: Registered<M>) {
    twice(registered);
}

fn main() {}
