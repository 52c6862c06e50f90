//! The transfer owns the guard until the outcome returns it.

use terrane_transfer::{Transfer, TransferManager};

fn example(manager: &TransferManager, transfer: Transfer, guard: Vec<u8>) {
    let completion = manager.submit(transfer, guard);
    drop(guard);
    drop(completion);
}

fn main() {}
