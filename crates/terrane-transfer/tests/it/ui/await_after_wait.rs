//! Neither is it awaited after it was waited for.

use terrane_transfer::Completion;

async fn example(completion: Completion<Vec<u8>>) {
    let first = completion.wait();
    let second = completion.await;
    drop((first, second));
}

fn main() {}
