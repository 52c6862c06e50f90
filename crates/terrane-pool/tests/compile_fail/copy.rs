//! A block cannot be copied, because it has one owner.

use terrane_core::Memory;
use terrane_pool::PoolBlock;

fn two_owners<M: Memory>(block: PoolBlock<M>) -> (PoolBlock<M>, PoolBlock<M>) {
    (block.clone(), block)
}

fn main() {}
