//! The parts of an open store, which all its jobs share, the table of its running jobs, and its
//! close.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use slab::Slab;
use terrane_core::OwnerProcess;
use terrane_core::metrics::ShardedCounters;
use terrane_core::sync::{lock, wait_until};
use terrane_transfer::TransferManager;

use crate::KeyHash;
use crate::error::StoreError;
use crate::key::KeyHasher;
use crate::slab::{JobId, Priority, SlabFailure};
use crate::store::claims::Claims;
use crate::store::gate::Gate;
use crate::store::group::GroupInfo;
use crate::store::job::Drained;
use crate::store::job::control::JobControl;
use crate::store::job::executor::Executor;
use crate::store::job::task::{begin_internal, is_ending_job, start};
use crate::store::key_names::KeyNames;
use crate::store::metrics::counters::StoreCounters;
use crate::store::open::builder::WritePolicy;
use crate::store::query::event::{KeyName, StoreEvent, StoreEventKind, Subscribers};
use crate::store::query::presence::TierId;
use crate::store::removal::recent::Recent;
use crate::store::removal::removed_keys::RemovedKeys;
use crate::store::sharded::Sharded;
use crate::store::slot_table::{SlotTable, SlotTableOwner};
use crate::store::tier::{DiskParts, Tier};
use crate::store::upkeep::maintenance::Maintenance;

/// A close with dirty blocks reserves this part of its time for the write-back.
const WRITE_BACK_SHARE: u32 = 2;

/// An open store.
pub(crate) struct StoreCore {
    pub(crate) owner: OwnerProcess,
    pub(crate) hasher: KeyHasher,
    pub(crate) groups: Vec<GroupInfo>,
    /// The fastest first.
    pub(crate) tiers: Vec<Tier>,
    pub(crate) disk: Option<DiskParts>,
    /// `None` if there is no memory tier: then nothing is copied between endpoints.
    pub(crate) manager: Option<TransferManager>,
    /// Whether the caller passed the manager.
    pub(crate) is_given_manager: bool,
    pub(crate) policy: WritePolicy,
    pub(crate) close_within: Duration,
    pub(crate) claims: Arc<Claims>,
    pub(crate) removed_keys: Arc<RemovedKeys>,
    /// The lock of a key's changes. A thread holds it from the change of the index to the record,
    /// so that both have one order. A query does not take it.
    pub(crate) order: Sharded<()>,
    pub(crate) gate: Gate,
    pub(crate) executor: Executor,
    pub(crate) maintenance: Maintenance,
    pub(crate) counters: StoreCounters,
    /// A histogram of nanoseconds. Its count is that of the jobs that ended.
    pub(crate) job_times: ShardedCounters,
    pub(crate) names: KeyNames,
    pub(crate) subscribers: Subscribers,
    pub(crate) recent: Recent,
    pub(crate) jobs: JobTable,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
    /// One resize at a time. Slots beyond a limit stay unused while it is locked.
    pub(crate) resizing: Mutex<()>,
    /// Set when the disk tier was reported as read-only.
    pub(crate) is_reported_read_only: AtomicBool,
}

/// The jobs that run.
#[derive(Default)]
pub(crate) struct JobTable {
    state: Mutex<RunningJobs>,
    ended: Condvar,
    next: AtomicU64,
    /// A copy of the state's flag, to read without its lock.
    is_closed: AtomicBool,
}

#[derive(Default)]
struct RunningJobs {
    running: Slab<Arc<JobControl>>,
    /// The jobs among them that the store began itself.
    internal: usize,
    /// The threads that wait for jobs to end.
    waiting: usize,
    is_closed: bool,
    /// Whether jobs of the store itself are refused, too.
    is_ending: bool,
}

/// The place of a job in the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct JobPlace {
    index: usize,
    pub(crate) origin: JobOrigin,
}

/// The origin of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobOrigin {
    Caller,
    /// The store itself: write-back.
    Store,
}

impl JobTable {
    pub(crate) fn next_id(&self) -> JobId {
        JobId::new(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds a job to the table, unless the store closes.
    pub(crate) fn begin(
        &self,
        control: &Arc<JobControl>,
        origin: JobOrigin,
    ) -> Result<JobPlace, StoreError> {
        let mut state = lock(&self.state);
        let is_refused = match origin {
            JobOrigin::Caller => state.is_closed,
            JobOrigin::Store => state.is_ending,
        };
        if is_refused {
            return Err(StoreError::Closed);
        }
        let index = state.running.insert(Arc::clone(control));
        state.internal += usize::from(origin == JobOrigin::Store);
        Ok(JobPlace { index, origin })
    }

    /// Removes a job from the table, and wakes the threads that wait for jobs to end.
    pub(crate) fn end(&self, place: JobPlace) {
        let mut state = lock(&self.state);
        let ended = state.running.try_remove(place.index);
        state.internal -= usize::from(place.origin == JobOrigin::Store);
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.ended.notify_all();
        }
        drop(ended);
    }

    /// The number of running jobs of callers.
    pub(crate) fn running(&self) -> usize {
        let state = lock(&self.state);
        state.running.len() - state.internal
    }

    /// Blocks until no job runs, or until the deadline. Returns the number of jobs that still run.
    /// `with_internal` counts jobs of the store itself, too.
    pub(crate) fn wait(&self, deadline: Option<Instant>, with_internal: bool) -> usize {
        let mut state = lock(&self.state);
        state.waiting += 1;
        loop {
            let internal = if with_internal { 0 } else { state.internal };
            let left = state.running.len() - internal;
            let waited =
                if left > 0 { wait_until(&self.ended, state, deadline) } else { Err(state) };
            state = match waited {
                Ok(state) => state,
                Err(mut state) => {
                    state.waiting -= 1;
                    return left;
                }
            };
        }
    }

    fn cancel_all(&self) {
        let running: Vec<_> =
            lock(&self.state).running.iter().map(|(_, control)| Arc::clone(control)).collect();
        running.iter().for_each(|control| control.cancel());
    }

    /// Refuses jobs of callers from now on. Returns whether it did before.
    pub(crate) fn close(&self) -> bool {
        self.is_closed.store(true, Ordering::Release);
        std::mem::replace(&mut lock(&self.state).is_closed, true)
    }

    /// Refuses jobs of the store itself, too.
    pub(crate) fn refuse_internal(&self) {
        lock(&self.state).is_ending = true;
    }

    /// Whether jobs are refused. [`begin`](Self::begin) decides; this refuses earlier.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }
}

impl StoreCore {
    /// Fails in a forked process, and after a close.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        self.owner.check()?;
        if self.jobs.is_closed() { Err(StoreError::Closed) } else { Ok(()) }
    }

    pub(crate) fn group(&self, group: u16) -> Result<&GroupInfo, StoreError> {
        let groups = self.groups.len();
        let found = self.groups.get(usize::from(group));
        found.ok_or_else(|| StoreError::NoSuchGroup { group, groups })
    }

    pub(crate) fn tier(&self, tier: TierId) -> Result<&Tier, StoreError> {
        let tiers = self.tiers.len();
        self.tiers.get(tier.index()).ok_or(StoreError::NoSuchTier { tier, tiers })
    }

    /// The manager, unless the caller passed it.
    pub(crate) fn own_manager(&self) -> Option<&TransferManager> {
        self.manager.as_ref().filter(|_| !self.is_given_manager)
    }

    /// The fastest tier whose memory the host can address.
    pub(crate) fn host_tier(&self, group: u16) -> Option<&Tier> {
        self.tiers.iter().find(|tier| tier.is_host(group))
    }

    /// The tier below.
    pub(crate) fn below(&self, tier: TierId) -> Option<&Tier> {
        self.tiers.get(tier.index() + 1)
    }

    pub(crate) fn key_name(&self, key: KeyHash) -> KeyName {
        self.names.get(key).map_or(KeyName::Hash(key), KeyName::Bytes)
    }

    /// Publishes an event about a key. It calls no foreign code: the key's order may be locked.
    pub(crate) fn publish(
        &self,
        kind: StoreEventKind,
        tier: Option<TierId>,
        group: u16,
        key: Option<KeyHash>,
    ) {
        if self.subscribers.are_none() {
            return;
        }
        let key = key.map(|key| self.key_name(key));
        self.publish_named(kind, tier, group, key);
    }

    /// Publishes an event about a key whose name is known.
    pub(crate) fn publish_named(
        &self,
        kind: StoreEventKind,
        tier: Option<TierId>,
        group: u16,
        key: Option<KeyName>,
    ) {
        if !self.subscribers.are_none() {
            self.subscribers.deliver(&StoreEvent { kind, tier, group, key });
        }
    }

    /// Forgets the bytes of a key that no tier has. The caller holds the lock of the key's order,
    /// under which a put adds both the name and the block.
    pub(crate) fn forget_name_in_order(&self, group: u16, key: KeyHash) {
        if self.names.is_empty() {
            return;
        }
        let has =
            |tier: &Tier| tier.table(group).is_some_and(|table| table.index.get(key).is_some());
        if !self.tiers.iter().any(has) {
            self.names.remove(key);
        }
    }

    /// Why the disk tier takes no blocks, if it does not.
    pub(crate) fn refuses_writes(&self) -> Option<Arc<StoreError>> {
        let disk = self.disk.as_ref()?;
        if disk.is_read_only {
            return Some(Arc::new(StoreError::ReadOnly));
        }
        match disk.slabs.refusal() {
            Some(SlabFailure::ReadOnly(error) | SlabFailure::Refused(error)) => Some(error),
            _ => disk.catalog.read_only().map(|error| Arc::new(error.into())),
        }
    }

    /// Reports once that the disk tier takes no more blocks, if it does not. No lock may be held.
    pub(crate) fn report_health(&self) {
        let Some(disk) = &self.disk else { return };
        let Some(reason) = self.refuses_writes().filter(|_| !disk.is_read_only) else { return };
        if !self.is_reported_read_only.swap(true, Ordering::Relaxed) {
            let tier = self.tiers.last().map(|tier| tier.id);
            self.publish(StoreEventKind::TierReadOnly, tier, 0, None);
            tracing::warn!(%reason, "the disk tier is read-only from now on");
        }
    }

    /// Ends all jobs and threads. It blocks, except on a thread of the store and in the drop of a
    /// guard.
    pub(crate) fn close(self: &Arc<Self>, deadline: Instant) -> Drained {
        if !self.owner.is_current() || self.jobs.close() {
            return Drained { left: 0, unwritten: 0 };
        }
        let own = std::thread::current().id();
        let is_own = lock(&self.threads).iter().any(|thread| thread.thread().id() == own);
        // The last clone may have dropped in the drop of a guard. There, no other task runs meanwhile, and
        // the job of the guard does not end.
        let is_own = is_own || is_ending_job();
        let deadline = if is_own { Instant::now() } else { deadline };
        let left = self.jobs.wait(Some(self.end_of_jobs(deadline)), false);
        if left > 0 {
            // They claim blocks that the write-back needs. A write-back that is cancelled leaves its
            // blocks to the one below.
            self.jobs.cancel_all();
        }
        self.write_all_back(deadline);
        self.jobs.refuse_internal();
        self.jobs.cancel_all();
        self.maintenance.stop(deadline);
        // A request in the device is waited for: its memory is in use.
        if let Some(disk) = &self.disk {
            let _ = self.jobs.wait(Some(deadline), true);
            disk.slabs.close(deadline);
        }
        let threads = std::mem::take(&mut *lock(&self.threads));
        if !is_own {
            let _ = self.jobs.wait(None, true);
        }
        self.executor.stop();
        for thread in threads {
            if !is_own && thread.join().is_err() {
                tracing::error!("a thread of the store panicked");
            }
        }
        let unwritten = if self.disk.is_some() { self.dirty_blocks() } else { 0 };
        if unwritten > 0 {
            tracing::warn!(unwritten, "the store closed before all blocks were on disk");
        }
        Drained { left, unwritten }
    }

    /// The time until which a close waits for jobs. The rest until the deadline is for the write-back.
    fn end_of_jobs(&self, deadline: Instant) -> Instant {
        if self.disk.is_none() || self.dirty_blocks() == 0 {
            return deadline;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        deadline.checked_sub(left / WRITE_BACK_SHARE).unwrap_or(deadline)
    }
}

impl SlotTableOwner for StoreCore {
    fn after_eviction(&self, table: &SlotTable, evicted: &[KeyHash]) {
        let tier = self.tiers.get(table.tier.index());
        if let Some(tier) = tier {
            tier.counters.evicted(terrane_core::convert::to_u64(evicted.len()));
        }
        for &key in evicted {
            let _order = self.order.lock(key);
            let tier = Some(table.tier);
            self.publish(StoreEventKind::Evicted, tier, table.group, Some(key));
            let is_back = table.index.get(key).is_some();
            if is_back {
                // The block was stored again before this eviction was published.
                self.publish(StoreEventKind::Stored, tier, table.group, Some(key));
            }
            self.forget_name_in_order(table.group, key);
        }
    }

    fn before_return(&self, table: &SlotTable, slots: &[u32]) {
        let is_disk = self.tiers.get(table.tier.index()).is_some_and(Tier::is_disk);
        let Some(disk) = self.disk.as_ref().filter(|_| is_disk) else { return };
        for &slot in slots {
            if let Err(error) = self.remove_last(table, disk, slot) {
                tracing::debug!(%error, slot, "the record of an evicted block stays in force");
            }
        }
    }

    fn after_retiring(&self, tier: TierId) {
        // A tier that records no removal keeps its bytes: the blocks are back after the next opening.
        let is_disk = self.tiers.get(tier.index()).is_some_and(Tier::is_disk);
        if is_disk && self.refuses_writes().is_none() {
            self.maintenance.request_punch();
        }
    }

    fn write_back_for(self: Arc<Self>, tier: TierId, group: u16, lacks: usize) {
        self.write_back(tier, group, lacks);
    }

    fn check_claims_for(self: Arc<Self>, tier: TierId, group: u16) {
        let found = self.tiers.get(tier.index());
        let Some(table) = found.and_then(|found| found.table(group)).cloned() else { return };
        let Some(begun) = begin_internal(&self, group, Priority::Low) else {
            return table.end_check();
        };
        let _job = start(begun, |task| async move {
            table.check_claims(&task.control).await;
            Vec::new()
        });
    }
}
