//! A guard that borrows from the caller could end before the copy does.

use terrane_transfer::{Transfer, TransferManager};

fn example(manager: &TransferManager, transfer: Transfer) {
    let table = vec![0_u8; 16];
    let completion = manager.submit(transfer, &table);
    drop(completion);
}

fn main() {}
