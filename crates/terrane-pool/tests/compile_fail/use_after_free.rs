//! A released block has no location, and a view of it does not outlive it.

use terrane_core::Memory;
use terrane_pool::{PoolBlock, StreamId};

fn use_after_release<M: Memory>(block: PoolBlock<M>) {
    let _ = block.release_on(StreamId::new(1));
    block.location();
}

fn view_after_release<M: Memory>(block: PoolBlock<M>) {
    let view = block.typed::<u32>(4);
    drop(block);
    drop(view);
}

fn main() {}
