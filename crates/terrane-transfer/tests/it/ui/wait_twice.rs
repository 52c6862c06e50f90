//! An outcome is taken once.

use terrane_transfer::Completion;

fn example(completion: Completion<Vec<u8>>) {
    let first = completion.wait();
    let second = completion.wait();
    drop((first, second));
}

fn main() {}
