//! Parts of a block store.

mod error;
mod eviction;
mod index;
mod key;
mod queue;
mod sync;

pub use error::{KeyError, QueueError};
pub use eviction::{EvictionPolicy, Lru, S3Fifo};
pub use index::{Freed, StoredBlock, TierIndex};
pub use key::{KeyHash, KeyHasher, MAX_KEY_BYTES};
pub use queue::{CompletionQueue, QueuePlace};
