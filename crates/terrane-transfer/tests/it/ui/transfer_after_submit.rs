//! A transfer is submitted once.

use terrane_transfer::{Transfer, TransferManager};

fn example(manager: &TransferManager, transfer: Transfer) {
    let first = manager.submit(transfer, ());
    let second = manager.submit(transfer, ());
    drop((first, second));
}

fn main() {}
