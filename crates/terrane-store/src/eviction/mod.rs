//! Eviction policies: the trait, `S3Fifo` and `Lru`. They choose the block that leaves a full tier.

mod ghost;
mod links;
mod lru;
mod s3_fifo;

use std::fmt;

use crate::KeyHash;

pub use lru::Lru;
pub use s3_fifo::S3Fifo;

/// Chooses the slot whose block is evicted. A slot is a number below the tier's capacity.
///
/// A store creates its own policies ([`EvictionKind`](crate::EvictionKind)), and accepts none of the caller.
/// A program with a [`TierIndex`](crate::TierIndex) of its own may implement one.
///
/// A policy synchronises itself, as threads call it at the same time. It knows slots only: the
/// caller owns keys, bytes and pins.
///
/// # Contract
///
/// The caller inserts a slot after it has stored a block there, and removes it before it reuses the
/// slot for another reason than [`evict`](Self::evict). A policy tolerates calls that break this
/// order: it evicts a worse block, and never panics.
pub trait EvictionPolicy: Send + Sync + fmt::Debug + 'static {
    /// A block with this key was stored in `slot`.
    fn insert(&self, slot: u32, key: KeyHash);

    /// Blocks were stored in these slots, one after the other: those of an earlier session. `key_of`
    /// returns the key of the block in a slot; each of these slots has one. The default implementation
    /// [inserts](Self::insert) each.
    fn insert_all(
        &self,
        slots: &mut dyn Iterator<Item = u32>,
        key_of: &dyn Fn(u32) -> Option<KeyHash>,
    ) {
        for slot in slots {
            key_of(slot).into_iter().for_each(|key| self.insert(slot, key));
        }
    }

    /// The block in `slot` was used. This is on the path of every hit, so it has to be short.
    fn hit(&self, slot: u32);

    /// The block in `slot` is gone, for another reason than an eviction. Without effect on a slot
    /// without a block.
    fn remove(&self, slot: u32);

    /// Evicts the block that is worth least, and returns its slot.
    ///
    /// `take` is called with the slot of each candidate. It removes the block from the caller's index
    /// and returns its key, or returns `None` if the block is in use. A candidate in use may come
    /// again. `evict` returns `None` if no block can be taken. It calls `take` while it holds the
    /// policy's lock.
    fn evict(&self, take: &mut dyn FnMut(u32) -> Option<KeyHash>) -> Option<u32>;

    /// The tier uses so many slots from now on, at most those that the policy was created for. The caller
    /// [removes](Self::remove) the blocks beyond them. The default implementation does nothing.
    fn set_limit(&self, slots: u32) {
        let _ = slots;
    }

    /// Whether a block with this key was evicted lately, as far as the policy remembers.
    fn was_evicted(&self, key: KeyHash) -> bool {
        let _ = key;
        false
    }
}
