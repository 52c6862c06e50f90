//! Only the owner can take the memory out, and that ends the registration.

use terrane_core::{Memory, Registered};

fn wrong<M: Memory>(registered: &mut Registered<M>) -> M {
    registered.into_memory()
}

fn apart<M: Memory>(registered: Registered<M>) -> M {
    let Registered { memory, .. } = registered;
    memory
}

fn main() {}
