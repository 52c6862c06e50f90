//! The contract of pegainfer's host tier, as a tier sees it.
//!
//! pegainfer is not a published crate, so its trait is written again here: `pegainfer-kv-store`,
//! `src/tier.rs`, in the repository `pegainfer-project/pegainfer` at commit e38dfdd8 of 21 August
//! 2026. In the engine, delete this file, and use `crate::tier` instead.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;

use crate::store_tier::PinnedPrefix;

/// A future that observes an operation. Dropping it does not stop the operation.
pub type TierFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Keeps a block of the engine from being reused. pegainfer's guard holds a block of its pool.
pub struct KvBlockGuard(
    #[expect(dead_code, reason = "a guard acts only when it drops")] pub Box<dyn Any + Send>,
);

/// The leading blocks of a prefix that the tier has, and pins until they are loaded or declined.
pub struct LeasedBlocks {
    /// Their number.
    pub blocks: usize,
    /// The pins. In the engine, this is the type of its own store's leases.
    pub lease: PinnedPrefix,
}

/// The answer to a query.
pub enum TierQuery {
    /// The tier has no block of the prefix, and none is on its way.
    Miss,
    /// Blocks are on their way. The engine asks again.
    Loading,
    /// The tier has these blocks.
    Hit(LeasedBlocks),
}

/// A tier below the engine's cache.
pub trait HostTier: Send + Sync {
    /// Finds the leading blocks of a prefix. With `wait_full`, the engine expects that another part of
    /// it saves all of them, and the answer is `Loading` until the tier has them.
    fn query(
        &self,
        req_id: &str,
        block_hashes: Vec<Vec<u8>>,
        wait_full: bool,
    ) -> TierFuture<anyhow::Result<TierQuery>>;

    /// Copies the blocks of a hit to these pages, on every device of the rank. It ends only when no
    /// copy writes to a page any more, even if it fails.
    fn load(&self, hit: LeasedBlocks, dst_page_ids: Vec<i32>) -> TierFuture<anyhow::Result<()>>;

    /// Declines a hit.
    fn release(&self, hit: LeasedBlocks);

    /// Copies blocks of the engine to the tier. The guards drop once the blocks have been read.
    fn save(
        &self,
        block_ids: Vec<i32>,
        block_hashes: Vec<Vec<u8>>,
        guards: Vec<KvBlockGuard>,
    ) -> TierFuture<anyhow::Result<()>>;

    /// Ends when queries see all saves that were submitted before this call.
    fn flush(&self) -> TierFuture<anyhow::Result<()>>;
}

/// One strided array of pages of the engine, such as those of a layer.
#[derive(Clone, Debug)]
pub struct ArenaSpec {
    /// The name, which differs from those of the rank's other arenas.
    pub name: String,
    /// The address of page 0 on the device.
    pub base_device_ptr: u64,
    /// The bytes of the allocation from there on.
    pub size_bytes: usize,
    /// The number of pages.
    pub num_blocks: usize,
    /// The bytes of one segment of a page.
    pub segment_bytes: usize,
    /// The segments of a page: 1, or 2 for K and V.
    pub segments: usize,
    /// The bytes from a segment of a page to the next one.
    pub kv_stride_bytes: usize,
    /// The bytes from a page to the next one.
    pub block_stride_bytes: usize,
}
