//! Memory is taken out with its registration's end, and by its owner.

use terrane_core::{Memory, Registered};

fn wrong<M: Memory>(registered: &mut Registered<M>) -> M {
    registered.into_memory()
}

fn apart<M: Memory>(registered: Registered<M>) -> M {
    let Registered { memory, .. } = registered;
    memory
}

fn main() {}
