//! A rank of an engine with a tier, for tests.

use std::any::Any;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use terrane::prelude::*;
use terrane::store::disk::Namespace;
use terrane::store::{BlockGroup, DiskTier, MemoryTier, Store, WritePolicy};

use crate::block_on::block_on;
use crate::contract::{HostTier, KvBlockGuard, LeasedBlocks, TierFuture, TierQuery};
use crate::engine::Engine;
use crate::store_tier::StoreTier;

/// Layers, pages and bytes of a segment. A page has 3 · 2 · 32 KiB, and an index of 64 bytes. So
/// two pages are more than a store copies by itself.
pub const SHAPE: (usize, usize, usize) = (3, 12, 32 << 10);

pub struct Rank {
    pub engine: Engine,
    pub cache: Endpoint,
    pub store: Store,
    pub tier: StoreTier,
}

impl Rank {
    /// A rank whose tier has `blocks` blocks in host memory, and none on disk.
    pub fn new(blocks: u32) -> Self {
        Self::with(None, &TransferManager::with_default_engines().unwrap(), blocks, None)
    }

    /// Saves three blocks, loads them into a mirror on another device or in host memory, and compares
    /// the pages of both.
    pub fn check_mirror_on(&self, device: Option<&Context>) {
        let mirror = Engine::new(device, SHAPE).unwrap();
        let caches = vec![self.cache.clone(), mirror.cache().unwrap()];
        let tier = StoreTier::new(self.store.clone(), caches).unwrap();
        self.save(&[1, 2, 3]).unwrap();
        let query = block_on(tier.query("request", hashes(&[1, 2, 3]), true)).unwrap();
        let TierQuery::Hit(hit) = query else { panic!("{}", name(&query)) };
        block_on(tier.load(hit, vec![7, 1, 11])).unwrap();
        for (page, number) in [(7, 1), (1, 2), (11, 3), (0, 0)] {
            let expected = self.engine.content(number);
            assert!(self.engine.read(page).unwrap() == expected, "page {page}");
            assert!(mirror.read(page).unwrap() == expected, "page {page} of the mirror");
        }
    }

    /// A rank with a device or without, and with a directory for blocks on disk or without.
    pub fn with(
        device: Option<&Context>,
        manager: &TransferManager,
        blocks: u32,
        directory: Option<&Path>,
    ) -> Self {
        let engine = Engine::new(device, SHAPE).unwrap();
        let cache = engine.cache().unwrap();
        let bytes = tier_bytes(&cache, blocks);
        let host = match device {
            Some(context) => {
                let pinned = PinnedAllocator::new(context, PinnedOptions::default()).unwrap();
                MemoryTier::allocated("pinned", bytes, pinned)
            }
            None => MemoryTier::system("host", bytes),
        };
        let mut store = Store::builder()
            .group(BlockGroup::of_layout("kv", cache.layout()))
            .memory_tier(host)
            .write_policy(WritePolicy::Back)
            .manager(manager);
        if let Some(directory) = directory {
            let namespace = Namespace::new("rank", [("model", "test")]).unwrap();
            let disk =
                DiskTier::new(directory, tier_bytes(&cache, 40)).preallocate(Requirement::Off);
            store = store.disk(disk).namespace(namespace);
        }
        let (store, _) = store.open().unwrap();
        assert_eq!(store.snapshot().tiers[0].groups[0].slots, usize::try_from(blocks).unwrap());
        let tier = StoreTier::new(store.clone(), vec![cache.clone()]).unwrap();
        Self { engine, cache, store, tier }
    }

    /// Computes pages with these numbers, and starts to save them under the same numbers.
    pub fn start_save(&self, numbers: &[u64], guard: &Guard) -> TierFuture<anyhow::Result<()>> {
        let pages: Vec<usize> = (0..numbers.len()).collect();
        for (&page, &number) in pages.iter().zip(numbers) {
            self.engine.write(page, number).unwrap();
        }
        let ids = pages.iter().map(|&page| i32::try_from(page).unwrap()).collect();
        self.tier.save(ids, hashes(numbers), pages.iter().map(|_| guard.take()).collect())
    }

    /// Saves pages, and wipes them.
    pub fn save(&self, numbers: &[u64]) -> anyhow::Result<()> {
        let guard = Guard::default();
        let result = block_on(self.start_save(numbers, &guard));
        assert_eq!(guard.held(), 0, "the guards drop before the save ends");
        (0..numbers.len()).for_each(|page| self.engine.write(page, 0).unwrap());
        result
    }

    pub fn query(&self, numbers: &[u64], wait_full: bool) -> TierQuery {
        block_on(self.tier.query("request", hashes(numbers), wait_full)).unwrap()
    }

    /// The hit of a query.
    #[track_caller]
    pub fn hit(&self, numbers: &[u64]) -> LeasedBlocks {
        match self.query(numbers, false) {
            TierQuery::Hit(hit) => hit,
            other => panic!("{}", name(&other)),
        }
    }

    /// The leading blocks that the tier has.
    pub fn has(&self, numbers: &[u64]) -> usize {
        match self.query(numbers, false) {
            TierQuery::Hit(hit) => {
                let blocks = hit.blocks;
                self.tier.release(hit);
                blocks
            }
            TierQuery::Miss => 0,
            TierQuery::Loading => panic!("blocks are on their way"),
        }
    }

    /// Loads all of these blocks to these pages, and compares every byte of every page.
    #[track_caller]
    pub fn load(&self, numbers: &[u64], pages: &[usize]) {
        let hit = self.hit(numbers);
        assert_eq!(hit.blocks, numbers.len());
        let ids = pages.iter().map(|&page| i32::try_from(page).unwrap()).collect();
        let mut expected: Vec<Vec<u8>> =
            (0..SHAPE.1).map(|page| self.engine.read(page).unwrap()).collect();
        block_on(self.tier.load(hit, ids)).unwrap();
        for (&page, &number) in pages.iter().zip(numbers) {
            expected[page] = self.engine.content(number);
        }
        for (page, expected) in expected.iter().enumerate() {
            assert!(self.engine.read(page).unwrap() == *expected, "page {page}");
        }
    }
}

/// The bytes of this many slots of a tier of memory.
pub fn tier_bytes(cache: &Endpoint, blocks: u32) -> ByteCount {
    // The store aligns slots to pages of the system.
    let slot = cache.layout().geometry().block_bytes().align_up(Alignment::PAGE).unwrap();
    slot.checked_mul("blocks", blocks.into()).unwrap()
}

pub fn hashes(numbers: &[u64]) -> Vec<Vec<u8>> {
    numbers.iter().map(|number| number.to_be_bytes().to_vec()).collect()
}

pub fn name(query: &TierQuery) -> &'static str {
    match query {
        TierQuery::Miss => "miss",
        TierQuery::Loading => "loading",
        TierQuery::Hit(_) => "hit",
    }
}

/// Counts guards that have not dropped.
#[derive(Clone, Default)]
pub struct Guard(Arc<AtomicUsize>);

struct Held(Arc<AtomicUsize>);

impl Guard {
    pub fn take(&self) -> KvBlockGuard {
        self.0.fetch_add(1, Ordering::SeqCst);
        KvBlockGuard(Box::new(Held(Arc::clone(&self.0))) as Box<dyn Any + Send>)
    }

    pub fn held(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}
