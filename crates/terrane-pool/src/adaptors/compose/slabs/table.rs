//! The table of slabs and of their free blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rustc_hash::FxHashMap;
use terrane_core::{Alignment, Memory};

use super::Slab;

/// The stride that a slab is cut by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stride {
    /// The length of a block: a multiple of the alignment.
    pub(super) bytes: u64,
    pub(super) alignment: Alignment,
}

/// The number of a slab among all slabs of its stride, and the index of a block in the slab.
pub(super) type Place = (u64, u32);

/// The slabs that have a block in use.
#[derive(Debug)]
pub(super) struct SlabTable<M: Memory> {
    strides: FxHashMap<Stride, StrideSlabs<M>>,
    pub(super) slabs: u64,
    /// The blocks in use.
    pub(super) blocks: u64,
    /// The bytes of the blocks in use.
    pub(super) bytes: u64,
}

/// The slabs of one stride.
#[derive(Debug)]
struct StrideSlabs<M: Memory> {
    slabs: BTreeMap<u64, SlabEntry<M>>,
    /// The slabs with a free block.
    open: BTreeSet<u64>,
    /// The bytes of all blocks, free ones included.
    held: u64,
    next: u64,
}

#[derive(Debug)]
struct SlabEntry<M: Memory> {
    slab: Arc<Slab<M>>,
    /// The free blocks, used as a stack.
    free: Vec<u32>,
}

impl<M: Memory> Slab<M> {
    /// The bytes of all blocks.
    fn block_bytes(&self) -> u64 {
        self.stride.bytes * u64::from(self.blocks)
    }
}

impl<M: Memory> SlabTable<M> {
    pub(super) fn new() -> Self {
        Self { strides: FxHashMap::default(), slabs: 0, blocks: 0, bytes: 0 }
    }

    /// The bytes of all blocks of a stride.
    pub(super) fn held(&self, stride: Stride) -> u64 {
        self.strides.get(&stride).map_or(0, |of_stride| of_stride.held)
    }

    /// Removes a free block from the oldest slab that has one, so that younger slabs become empty.
    pub(super) fn take(&mut self, stride: Stride) -> Option<(Arc<Slab<M>>, Place)> {
        let of_stride = self.strides.get_mut(&stride)?;
        let number = *of_stride.open.first()?;
        let entry = of_stride.slabs.get_mut(&number)?;
        let index = entry.free.pop()?;
        if entry.free.is_empty() {
            of_stride.open.remove(&number);
        }
        self.blocks += 1;
        self.bytes += stride.bytes;
        Some((Arc::clone(&entry.slab), (number, index)))
    }

    /// Adds a slab, and returns its first block.
    pub(super) fn add(&mut self, slab: &Arc<Slab<M>>) -> Place {
        let stride = slab.stride;
        let (slabs, open) = (BTreeMap::new(), BTreeSet::new());
        let new = StrideSlabs { slabs, open, held: 0, next: 0 };
        let of_stride = self.strides.entry(stride).or_insert(new);
        let number = of_stride.next;
        of_stride.next += 1;
        of_stride.held += slab.block_bytes();
        let free: Vec<_> = (1..slab.blocks).rev().collect();
        if !free.is_empty() {
            of_stride.open.insert(number);
        }
        of_stride.slabs.insert(number, SlabEntry { slab: Arc::clone(slab), free });
        self.slabs += 1;
        self.blocks += 1;
        self.bytes += stride.bytes;
        (number, 0)
    }

    /// Frees a block. If all blocks of its slab are free, removes the slab and returns it.
    pub(super) fn free(&mut self, stride: Stride, number: u64, index: u32) -> Option<Arc<Slab<M>>> {
        let of_stride = self.strides.get_mut(&stride)?;
        let entry = of_stride.slabs.get_mut(&number)?;
        self.blocks -= 1;
        self.bytes -= stride.bytes;
        entry.free.push(index);
        if u32::try_from(entry.free.len()) != Ok(entry.slab.blocks) {
            of_stride.open.insert(number);
            return None;
        }
        of_stride.open.remove(&number);
        let entry = of_stride.slabs.remove(&number)?;
        of_stride.held -= entry.slab.block_bytes();
        self.slabs -= 1;
        if of_stride.slabs.is_empty() {
            self.strides.remove(&stride);
        }
        Some(entry.slab)
    }
}
