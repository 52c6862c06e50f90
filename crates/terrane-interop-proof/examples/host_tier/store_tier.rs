//! pegainfer's `HostTier` over a block store of Terrane.
//!
//! The store has the blocks, their eviction and their checksums. The tier translates pages and
//! hashes to it. It starts no thread and needs no runtime.

use std::collections::BTreeSet;
use std::future::{self, ready};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use terrane::prelude::*;
use terrane::store::{Blocks, Job, JobOptions, JobOutcome, Lease, Presence, Store, TierId};

use crate::contract::{HostTier, KvBlockGuard, LeasedBlocks, TierFuture, TierQuery};

/// The store's group of the rank's blocks.
const GROUP: u16 = 0;

/// The time after which a hit that was neither loaded nor declined is no longer pinned.
const LEASED_FOR: Duration = Duration::from_secs(60);

/// A tier of a rank. Ranks whose blocks are equal share a store: clone it.
pub struct StoreTier {
    store: Store,
    /// The rank's cache, and the caches of devices that have the same blocks.
    caches: Vec<Endpoint>,
    /// The tier on disk.
    disk: Option<TierId>,
    /// The most blocks that one put may have.
    blocks_at_once: usize,
    saves: Arc<Saves>,
}

impl StoreTier {
    /// Creates a tier. Saves read from the first cache, and loads write to all of them.
    ///
    /// # Errors
    ///
    /// There is no cache, or the store has no group 0.
    pub fn new(store: Store, caches: Vec<Endpoint>) -> anyhow::Result<Self> {
        ensure!(!caches.is_empty(), "a tier without a cache was requested; pass one or more");
        let tiers = store.snapshot().tiers;
        let disk = tiers.iter().position(|tier| tier.is_disk);
        let disk = disk.map(u8::try_from).transpose()?.map(TierId::new);
        let slots = tiers.iter().filter_map(|tier| tier.groups.get(usize::from(GROUP)));
        let slots = slots.map(|group| group.slots).min().context("the store has no group")?;
        Ok(Self { store, caches, disk, blocks_at_once: slots.max(1), saves: Arc::default() })
    }

    /// The options of a job with this cache. The engine has synchronised its stream: it calls after
    /// the step that wrote the blocks, and gives away pages that no kernel uses.
    fn options(cache: &Endpoint) -> JobOptions {
        let options = JobOptions::new().group(GROUP);
        if cache.kind().is_device() {
            options.device_order(DeviceOrder::AlreadySynchronised)
        } else {
            options
        }
    }

    fn find(&self, keys: Vec<Vec<u8>>, wait_full: bool) -> TierQuery {
        let mut found = vec![Presence::Absent; keys.len()];
        self.store.presence(GROUP, &keys, &mut found);
        let blocks = found.iter().take_while(|presence| presence.is_ready()).count();
        if blocks < keys.len() && wait_full || found.first() == Some(&Presence::Writing) {
            return TierQuery::Loading;
        }
        if blocks == 0 {
            return TierQuery::Miss;
        }
        let (mut in_memory, mut on_disk) = (Box::<Part>::default(), Box::<Part>::default());
        for (at, (key, presence)) in keys.into_iter().zip(found).take(blocks).enumerate() {
            let is_on_disk =
                matches!(presence, Presence::Ready { tier, .. } if Some(tier) == self.disk);
            let part = if is_on_disk { &mut on_disk } else { &mut in_memory };
            part.keys.push(key);
            part.positions.push(at);
        }
        for part in [&mut in_memory, &mut on_disk] {
            let lease = self.store.acquire(GROUP, &part.keys, LEASED_FOR);
            if lease.prefix() < part.keys.len() {
                // A block was evicted between the two calls.
                return TierQuery::Loading;
            }
            part.pins = Some(lease);
        }
        TierQuery::Hit(LeasedBlocks { blocks, lease: PinnedPrefix { in_memory, on_disk } })
    }

    /// Starts to load a part of a hit to each cache. `keep` keeps its blocks pinned until its jobs
    /// have ended.
    fn load_part(&self, part: Part, pages: &[u32], keep: bool) -> Vec<anyhow::Result<Job>> {
        if part.keys.is_empty() {
            return Vec::new();
        }
        let pages: Vec<u32> =
            part.positions.iter().filter_map(|&at| pages.get(at)).copied().collect();
        let pins = Arc::new(part.pins);
        let get = |cache: &Endpoint| {
            let guard = keep.then(|| Arc::clone(&pins));
            let blocks = Blocks::new(cache, &pages);
            let job = self.store.get(&part.keys, blocks, Self::options(cache), guard);
            Ok(job.map_err(|refused| refused.cause)?)
        };
        self.caches.iter().map(get).collect()
    }
}

impl HostTier for StoreTier {
    fn query(
        &self,
        _req_id: &str,
        block_hashes: Vec<Vec<u8>>,
        wait_full: bool,
    ) -> TierFuture<anyhow::Result<TierQuery>> {
        Box::pin(ready(Ok(self.find(block_hashes, wait_full))))
    }

    fn load(&self, hit: LeasedBlocks, dst_page_ids: Vec<i32>) -> TierFuture<anyhow::Result<()>> {
        let LeasedBlocks { blocks, lease: PinnedPrefix { in_memory, on_disk } } = hit;
        let started = pages(&dst_page_ids, blocks).and_then(distinct).map(|pages| {
            // The jobs pin what they copy from memory. Blocks from disk to a device need slots
            // there, so the first lease ends before the second part begins.
            let mut jobs = self.load_part(*in_memory, &pages, false);
            jobs.extend(self.load_part(*on_disk, &pages, true));
            jobs
        });
        end_of(started, "load")
    }

    fn release(&self, hit: LeasedBlocks) {
        drop(hit);
    }

    fn save(
        &self,
        block_ids: Vec<i32>,
        block_hashes: Vec<Vec<u8>>,
        guards: Vec<KvBlockGuard>,
    ) -> TierFuture<anyhow::Result<()>> {
        let saving = Arc::new(Saves::begin(&self.saves, guards));
        let Some(cache) = self.caches.first() else { return Box::pin(ready(Ok(()))) };
        let started = pages(&block_ids, block_hashes.len()).map(|pages| {
            let put = |(pages, keys): (&[u32], &[Vec<u8>])| {
                let source = Blocks::new(cache, pages);
                let job = self.store.put(keys, source, Self::options(cache), saving.clone());
                Ok(job.map_err(|refused| refused.cause)?)
            };
            // The head of the prefix comes last, so that it is evicted last.
            let most = self.blocks_at_once;
            pages.rchunks(most).zip(block_hashes.rchunks(most)).map(put).collect()
        });
        end_of(started, "save")
    }

    fn flush(&self) -> TierFuture<anyhow::Result<()>> {
        let saves = Arc::clone(&self.saves);
        let before = saves.lock().begun;
        Box::pin(future::poll_fn(move |context| {
            // Wakers are foreign code, so they are cloned and dropped without the lock.
            let waker = context.waker().clone();
            let mut state = saves.lock();
            if state.running.range(..before).next().is_none() {
                drop(state);
                return Poll::Ready(Ok(()));
            }
            state.waiting.push(waker);
            Poll::Pending
        }))
    }
}

/// The blocks of a hit, and the pins on them. A drop declines the hit.
#[derive(Debug)]
pub struct PinnedPrefix {
    in_memory: Box<Part>,
    on_disk: Box<Part>,
}

/// The blocks of a hit that are in one kind of tier.
#[derive(Debug, Default)]
struct Part {
    keys: Vec<Vec<u8>>,
    /// The position of each key in the hit.
    positions: Vec<usize>,
    pins: Option<Lease>,
}

/// Observes the jobs of a call. It ends when all of them have ended, with the first error.
fn end_of(
    started: anyhow::Result<Vec<anyhow::Result<Job>>>,
    what: &'static str,
) -> TierFuture<anyhow::Result<()>> {
    Box::pin(async move {
        let mut result = Ok(());
        for job in started? {
            let ended = match job {
                Ok(job) => all_done(&job.await),
                Err(refused) => Err(refused),
            };
            result = result.and(ended.with_context(|| format!("the {what} failed")));
        }
        result
    })
}

fn all_done(outcome: &JobOutcome) -> anyhow::Result<()> {
    match outcome.results.iter().find(|result| !result.is_ok()) {
        Some(result) => Err(anyhow!("{result}")),
        None => Ok(()),
    }
}

/// Converts pages to block ids, of which there are as many as `blocks`.
fn pages(ids: &[i32], blocks: usize) -> anyhow::Result<Vec<u32>> {
    let count = ids.len();
    ensure!(count == blocks, "{count} pages for {blocks} blocks; pass one page for each block");
    let page = |&id: &i32| u32::try_from(id).with_context(|| format!("page {id} does not exist"));
    ids.iter().map(page).collect()
}

/// Refuses pages that two blocks of a hit would be written to. The two parts of a hit are loaded by
/// separate jobs, so no job sees all pages.
fn distinct(pages: Vec<u32>) -> anyhow::Result<Vec<u32>> {
    let mut seen = BTreeSet::new();
    match pages.iter().find(|&&page| !seen.insert(page)) {
        Some(page) => Err(anyhow!("page {page} is named twice; name each page once")),
        None => Ok(pages),
    }
}

/// The saves that are running, for `flush`.
#[derive(Default)]
struct Saves(Mutex<SavesState>);

#[derive(Default)]
struct SavesState {
    /// The number of saves so far.
    begun: u64,
    running: BTreeSet<u64>,
    waiting: Vec<Waker>,
}

/// A save that is running: the guard of its jobs.
struct Saving {
    saves: Arc<Saves>,
    number: u64,
    /// Guards need not be `Sync`.
    guards: Mutex<Vec<KvBlockGuard>>,
}

impl Saves {
    fn begin(this: &Arc<Self>, guards: Vec<KvBlockGuard>) -> Saving {
        let mut state = this.lock();
        let number = state.begun;
        state.begun += 1;
        state.running.insert(number);
        drop(state);
        Saving { saves: Arc::clone(this), number, guards: Mutex::new(guards) }
    }

    fn lock(&self) -> MutexGuard<'_, SavesState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        self.guards.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        let mut state = self.saves.lock();
        state.running.remove(&self.number);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}
