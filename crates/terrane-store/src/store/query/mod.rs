//! Queries and leases, subscriptions, snapshots and resizes: calls that need no job.

pub(crate) mod event;
pub(crate) mod lease;
pub(crate) mod presence;
pub(crate) mod why;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use terrane_core::sync::lock;
use terrane_core::{ByteCount, CapabilityReport};

use terrane_transfer::TransferManager;

use crate::KeyHash;
use crate::error::StoreError;
use crate::slab::SlabBuffers;
use crate::store::Store;
use crate::store::claims::ClaimKind;
use crate::store::group::shares;
use crate::store::metrics::snapshot::{Misses, StoreSnapshot, TierSnapshot};
use crate::store::query::event::{Events, StoreEventKind};
use crate::store::query::lease::{Lease, LeasePins};
use crate::store::query::presence::{Presence, TierId};
use crate::store::query::why::Why;
use crate::store::shared::StoreCore;
use crate::store::slot_table::{LeasedSlot, PinnedSlot};
use crate::store::tier::{Tier, count};

/// Keys that are looked up together: their cache misses overlap.
const BATCH: usize = 64;

impl Store {
    /// Writes the state of each key to `out`, which has the length of `keys`. A key that is refused,
    /// and a group that does not exist, are absent.
    pub fn presence<K: AsRef<[u8]>>(&self, group: u16, keys: &[K], out: &mut [Presence]) {
        let core = self.core();
        if !core.owner.is_current() {
            out.fill(Presence::Absent);
            return;
        }
        if keys.len() == 1 {
            // Without the arrays of a batch.
            return core.presence_of_batch::<1, K>(group, keys, out);
        }
        for (keys, out) in keys.chunks(BATCH).zip(out.chunks_mut(BATCH)) {
            core.presence_of_batch::<BATCH, K>(group, keys, out);
        }
    }

    /// The number of leading keys that are ready.
    #[must_use]
    pub fn prefix<K: AsRef<[u8]>>(&self, group: u16, keys: &[K]) -> usize {
        let core = self.core();
        if !core.owner.is_current() {
            return 0;
        }
        let mut ready = 0;
        let mut out = [Presence::Absent; BATCH];
        for keys in keys.chunks(BATCH) {
            core.presence_of_batch::<BATCH, K>(group, keys, &mut out);
            let leading = out.iter().take(keys.len()).take_while(|found| found.is_ready()).count();
            ready += leading;
            if leading < keys.len() {
                break;
            }
        }
        ready
    }

    /// The state of each key, and pins of the blocks that are ready, until the lease drops or `ttl`
    /// is over. A pinned block is not evicted. Each key is looked up and pinned in one step.
    pub fn acquire<K: AsRef<[u8]>>(&self, group: u16, keys: &[K], ttl: Duration) -> Lease {
        let core = self.core();
        let mut presence = vec![Presence::Absent; keys.len()];
        let mut slots = Vec::new();
        if core.owner.is_current() {
            self.presence(group, keys, &mut presence);
            for (key, presence) in keys.iter().zip(&mut presence) {
                let lease = || core.lease(group, key.as_ref());
                // It may have moved to a faster tier between the two looks.
                let leased = lease().or_else(|| if presence.is_ready() { lease() } else { None });
                if let Some(leased) = leased {
                    let (tier, length) = (leased.pin.table.tier, leased.pin.block.length);
                    *presence = Presence::Ready { tier, length };
                    slots.push(leased);
                } else if presence.is_ready() {
                    // It left between the two looks.
                    *presence = Presence::Absent;
                }
            }
        }
        let pins = Arc::new(LeasePins::new(slots));
        let at = Instant::now().checked_add(ttl).filter(|_| core.owner.is_current());
        let timer = at.map(|at| core.executor.timer(at, Arc::clone(&pins).into()));
        Lease { presence, pins, _timer: timer }
    }

    /// Counts a use of each block that is ready, so that it is evicted later.
    pub fn touch<K: AsRef<[u8]>>(&self, group: u16, keys: &[K]) {
        let core = self.core();
        if !core.owner.is_current() {
            return;
        }
        // As a get of the keys.
        for key in keys.iter().rev() {
            if let Ok(hash) = core.hasher.hash_in_group(group, key.as_ref()) {
                core.touch_stored(group, hash);
            }
        }
    }

    /// Why a key is, or is not, in the store.
    #[must_use]
    pub fn why(&self, group: u16, key: &[u8]) -> Why {
        let core = self.core();
        let hash = core.hasher.hash_in_group(group, key);
        let Ok(hash) = hash else { return Why::NeverSeen };
        if !core.owner.is_current() {
            return Why::NeverSeen;
        }
        let find = |tier: &Tier| {
            let table = tier.table(group)?;
            let block = table.index.get(hash)?;
            Some((tier.id, block.length, table.is_leased(block.slot)))
        };
        let found: Vec<(TierId, u32, bool)> = core.tiers.iter().filter_map(find).collect();
        if let Some((_, length, _)) = found.first() {
            return Why::Present {
                tiers: found.iter().map(|(tier, ..)| *tier).collect(),
                length: *length,
                is_pinned: found.iter().any(|(.., is_pinned)| *is_pinned),
            };
        }
        if core.claims.get(hash).is_some_and(|claim| claim.kind == ClaimKind::Put) {
            return Why::Writing;
        }
        match core.recent.get(hash) {
            Some(StoreEventKind::Corrupt) => Why::Corrupt,
            Some(StoreEventKind::Unreadable) => Why::Unreadable,
            Some(_) => Why::Removed,
            None if core.was_evicted(group, hash) => Why::Evicted,
            None => Why::NeverSeen,
        }
    }

    /// Subscribes to changes from now on. At most `capacity` events wait.
    ///
    /// # Errors
    ///
    /// [`StoreError::Queue`] if `capacity` is zero or the process has no descriptor left.
    pub fn events(&self, capacity: usize) -> Result<Events, StoreError> {
        let core = self.core();
        core.owner.check()?;
        core.subscribers.add(capacity)
    }

    /// The capabilities that the file systems and the kernel granted.
    #[must_use]
    pub fn capabilities(&self) -> CapabilityReport {
        let core = self.core();
        let disk = core.disk.as_ref().filter(|_| core.owner.is_current());
        let mut report = disk.map(|disk| disk.slabs.capabilities()).unwrap_or_default();
        for blocks in core.tiers.iter().flat_map(|tier| &tier.memory) {
            report.extend(blocks.endpoint.layout().capabilities().outcomes().iter().cloned());
        }
        report
    }

    /// Sets the capacity of a tier, up to the one it was opened with. The groups share it by
    /// [weight](crate::BlockGroup::weight). Blocks are evicted until they fit; those in use keep
    /// their slots until they are not. The disk blocks of slots that a disk tier no longer has are
    /// freed in the background, if the file system supports holes in files.
    ///
    /// A capacity of no block is accepted: the tier then stores nothing, and jobs that need its slots end
    /// without room.
    ///
    /// Returns the capacity that the tier has from now on. It blocks while the disk blocks of an
    /// earlier resize are being freed.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSuchTier`], [`StoreError::Closed`] and [`StoreError::Forked`].
    pub fn resize(&self, tier: TierId, bytes: ByteCount) -> Result<ByteCount, StoreError> {
        let core = self.core();
        core.check()?;
        let found = core.tier(tier)?;
        let mut total = 0;
        let mut beyond = Vec::new();
        let resizing = lock(&core.resizing);
        let shared = found.tables.iter().zip(shares(&core.groups, bytes));
        for ((table, share), &slot_bytes) in shared.zip(&found.slot_bytes) {
            let slots = share / slot_bytes.max(1);
            let most = u32::try_from(table.index.capacity()).unwrap_or(u32::MAX);
            let slots = u32::try_from(slots).unwrap_or(u32::MAX).min(most);
            beyond.push((table, table.set_limit(slots)));
            total += u64::from(slots) * slot_bytes;
        }
        // Evictions may call copy engines and subscribers of the trace.
        drop(resizing);
        beyond.into_iter().for_each(|(table, slots)| table.evict_all_beyond(slots));
        Ok(ByteCount::new(total))
    }
}

impl StoreCore {
    fn presence_of_batch<const MOST: usize, K: AsRef<[u8]>>(
        &self,
        group: u16,
        keys: &[K],
        out: &mut [Presence],
    ) {
        // Before the look-ups: a put that begins later is later than this query.
        let (has_claims, begun) = (self.claims.len() > 0, self.claims.begun());
        let mut hashes = [None; MOST];
        for (hash, key) in hashes.iter_mut().zip(keys) {
            *hash = self.hasher.hash_in_group(group, key.as_ref()).ok();
        }
        out.fill(Presence::Absent);
        for tier in &self.tiers {
            let Some(table) = tier.table(group) else { continue };
            if MOST > 1 {
                let left = out.iter().zip(hashes).filter(|(out, _)| **out == Presence::Absent);
                table.index.prefetch(left.filter_map(|(_, hash)| hash));
            }
            for (out, hash) in out.iter_mut().zip(hashes) {
                if *out == Presence::Absent
                    && let Some(block) = hash.and_then(|hash| table.index.get(hash))
                {
                    *out = Presence::Ready { tier: tier.id, length: block.length };
                }
            }
        }
        // A block that moved meanwhile was perhaps in no tier when the query looked there.
        let has_moved = || self.tiers.len() > 1 && self.claims.begun() != begun;
        if !has_claims && !has_moved() {
            return;
        }
        for (out, hash) in out.iter_mut().zip(hashes) {
            let claim = hash.and_then(|hash| Some((hash, self.claims.get(hash)?)));
            *out = match (*out, claim) {
                // A put or a move may have ended between the two looks.
                (Presence::Absent, None) => {
                    hash.map_or(Presence::Absent, |hash| self.ready(group, hash))
                }
                (Presence::Absent, Some((hash, claim))) => match self.ready(group, hash) {
                    Presence::Absent if claim.kind == ClaimKind::Put => Presence::Writing,
                    ready => ready,
                },
                (Presence::Ready { tier, length }, Some((_, claim)))
                    if claim.kind == ClaimKind::Load =>
                {
                    Presence::Loading { tier, length }
                }
                (found, _) => found,
            };
        }
    }

    #[inline]
    fn ready(&self, group: u16, key: KeyHash) -> Presence {
        for tier in &self.tiers {
            if let Some(block) = tier.table(group).and_then(|table| table.index.get(key)) {
                return Presence::Ready { tier: tier.id, length: block.length };
            }
        }
        Presence::Absent
    }

    /// Pins a block in the fastest tier that has it.
    pub(crate) fn pin(&self, group: u16, key: KeyHash) -> Option<PinnedSlot> {
        self.tiers.iter().find_map(|tier| tier.table(group)?.pin(key))
    }

    /// The host memory of a block's bytes, if the host can address the tier.
    pub(crate) fn host_memory(&self, pin: &PinnedSlot) -> Option<SlabBuffers> {
        let group = pin.table.group;
        let memory = self.tiers.get(pin.table.tier.index())?.blocks(group)?;
        let info = self.group(group).ok().filter(|_| memory.facts.is_host)?;
        Some(memory.buffers(info, pin.block.slot, pin.block.length))
    }

    fn lease(&self, group: u16, key: &[u8]) -> Option<LeasedSlot> {
        let hash = self.hasher.hash_in_group(group, key).ok()?;
        self.tiers.iter().find_map(|tier| tier.table(group)?.lease(hash))
    }

    /// Counts a use of a block in each tier that has it. Returns whether one has.
    pub(crate) fn touch_stored(&self, group: u16, key: KeyHash) -> bool {
        touch_in(&self.tiers, group, key)
    }

    /// Counts a use of a block in each slower tier that has it.
    pub(crate) fn touch_below(&self, tier: TierId, group: u16, key: KeyHash) {
        let slower = self.tiers.get(tier.index() + 1..).unwrap_or_default();
        touch_in(slower, group, key);
    }

    /// Whether the bytes of a key are these, as far as they are kept.
    pub(crate) fn is_name(&self, key: KeyHash, bytes: &[u8]) -> bool {
        !self.names.keeps_all || self.names.get(key).is_none_or(|kept| *kept == *bytes)
    }

    pub(crate) fn count_absent(&self, group: u16, key: KeyHash) {
        let reason = if self.was_evicted(group, key) {
            &self.counters.missed_evicted
        } else {
            &self.counters.missed_absent
        };
        count(reason, 1);
    }

    fn was_evicted(&self, group: u16, key: KeyHash) -> bool {
        let mut tables = self.tiers.iter().filter_map(|tier| tier.table(group));
        tables.any(|table| table.was_evicted(key))
    }

    pub(crate) fn snapshot(&self) -> StoreSnapshot {
        if !self.owner.is_current() {
            return StoreSnapshot::default();
        }
        let counters = &self.counters;
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let tables = || self.tiers.iter().flat_map(|tier| &tier.tables);
        let job_times = self.job_times.histogram(0);
        StoreSnapshot {
            tiers: self.tiers.iter().map(|tier| self.tier_snapshot(tier)).collect(),
            misses: Misses {
                absent: get(&counters.missed_absent),
                writing: get(&counters.missed_writing),
                corrupt: get(&counters.missed_corrupt),
                evicted: get(&counters.missed_evicted),
                wrong_length: get(&counters.missed_length),
            },
            running_jobs: self.jobs.running(),
            ended_jobs: job_times.count(),
            refused_jobs: get(&counters.refused_jobs),
            already_stored: get(&counters.already_stored),
            timed_out: get(&counters.timed_out),
            cancelled: get(&counters.cancelled),
            failed: get(&counters.failed),
            job_times,
            keys_in_flight: self.claims.len(),
            jobs_waiting_for_room: tables().map(|table| table.waiters()).sum(),
            transfers: self.own_manager().map(TransferManager::snapshot),
            catalog: self.disk.as_ref().and_then(|disk| disk.catalog.snapshot().ok()),
        }
    }

    fn tier_snapshot(&self, tier: &Tier) -> TierSnapshot {
        let sizes = tier.tables.iter().zip(&tier.slot_bytes);
        let capacity = sizes.map(|(table, bytes)| u64::from(table.limit()) * bytes).sum();
        let disk = self.disk.as_ref().filter(|_| tier.is_disk());
        let file_bytes = disk.map_or(0, |disk| disk.slabs.file_bytes());
        let io = disk.map(|disk| disk.slabs.io_numbers());
        let [reads_queued, writes_queued, requests] = io.unwrap_or_default();
        let refused = disk.and_then(|_| self.refuses_writes());
        let read_only = refused.map(|error| error.to_string());
        let mut snapshot = TierSnapshot {
            name: tier.name.clone(),
            is_disk: tier.is_disk(),
            groups: tier.tables.iter().map(|table| table.snapshot()).collect(),
            capacity: ByteCount::new(capacity),
            file_bytes: ByteCount::new(file_bytes),
            reads_queued,
            writes_queued,
            requests,
            read_only,
            ..TierSnapshot::default()
        };
        tier.counters.write_to(&mut snapshot);
        snapshot
    }
}

/// Counts a use of a block in each of these tiers that has it. Returns whether one has.
fn touch_in(tiers: &[Tier], group: u16, key: KeyHash) -> bool {
    let mut is_stored = false;
    for table in tiers.iter().filter_map(|tier| tier.table(group)) {
        if let Some(block) = table.index.get(key) {
            table.touch(block.slot);
            is_stored = true;
        }
    }
    is_stored
}
