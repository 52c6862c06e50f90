//! A released block has no location, and a borrow of its memory does not outlive it.

use terrane_core::Memory;
use terrane_pool::{PoolBlock, StreamId};

fn use_after_release<M: Memory>(block: PoolBlock<M>) {
    let _ = block.release_on(StreamId::new(1));
    block.location();
}

fn borrow_after_release<M: Memory>(block: PoolBlock<M>) {
    let memory: &dyn Memory = &block;
    drop(block);
    memory.location();
}

fn main() {}
