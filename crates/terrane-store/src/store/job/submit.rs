//! The calls that submit jobs.

use std::sync::Arc;

use crate::error::StoreError;
use crate::store::Store;
use crate::store::get;
use crate::store::get::direct;
use crate::store::get::load;
use crate::store::job::blocks::Blocks;
use crate::store::job::layers::LayerArrivals;
use crate::store::job::options::JobOptions;
use crate::store::job::request::{Keys, Payload, PayloadUse};
use crate::store::job::task::{begin, begin_without_task, start};
use crate::store::job::{Job, Refused};
use crate::store::put;
use crate::store::put::write_back;
use crate::store::query::presence::TierId;
use crate::store::removal;
use crate::store::shared::{JobOrigin, StoreCore};
use crate::store::tier::count;

impl Store {
    /// Stores blocks. Keys that are stored are skipped. If another put writes a key, the job waits
    /// for it, and writes the key from this source if that put fails.
    ///
    /// `guard` keeps the memory of the source. It drops when the job has ended.
    ///
    /// A job takes the slots of all its new blocks in a tier at once, and waits until it gets them. If
    /// it needs more than the tier has for the group, its blocks end at once with
    /// [`NoRoom`](crate::NoRoom), which states both numbers. So a caller splits what it puts into jobs
    /// of fewer blocks than the smallest tier has slots.
    ///
    /// # Errors
    ///
    /// [`Refused`] returns the guard, with the key, the block, the group or the queue that is wrong.
    pub fn put<K: AsRef<[u8]>, G: Send + 'static>(
        &self,
        keys: &[K],
        source: Blocks,
        options: JobOptions,
        guard: G,
    ) -> Result<Job, Refused<G>> {
        let core = self.core();
        let begun = check(core, keys, source, &options, PayloadUse::Source).and_then(|checked| {
            let begun = begin(core, JobOrigin::Caller, options, keys.len())?;
            Ok((checked, begun))
        });
        let ((keys, source), (job, task, end)) = match begun {
            Ok(begun) => begun,
            Err(cause) => return Err(refuse(core, guard, cause)),
        };
        task.guard.set(guard);
        let source = Arc::new(source);
        let in_flight = core.removed_keys.begin_put();
        core.executor.spawn(async move {
            let results = put::run(&task, &keys, source, in_flight).await;
            end.finish(results);
        });
        Ok(job)
    }

    /// Reads blocks, each from the fastest tier that has it. If a put writes a key, the job waits
    /// for it. It waits for slots only if a copy engine cannot write a block to the destination
    /// directly, such as from disk to a device.
    ///
    /// `guard` keeps the memory of the destination. It drops when the job has ended.
    ///
    /// # Errors
    ///
    /// As [`put`](Self::put), and [`StoreError::DestinationNamedTwice`].
    pub fn get<K: AsRef<[u8]>, G: Send + 'static>(
        &self,
        keys: &[K],
        destination: Blocks,
        options: JobOptions,
        guard: G,
    ) -> Result<Job, Refused<G>> {
        let core = self.core();
        let checked = check(core, keys, destination, &options, PayloadUse::Destination);
        let (keys, destination) = match checked {
            Ok(checked) => checked,
            Err(cause) => return Err(refuse(core, guard, cause)),
        };
        if let Some(found) = direct::find(core, &options, &keys, &destination) {
            let begun = begin_without_task(core, JobOrigin::Caller, &options, keys.len());
            return match begun {
                Ok(parts) => Ok(found.start(core, (parts, &options), (&keys, destination), guard)),
                Err(cause) => Err(refuse(core, guard, cause)),
            };
        }
        let layers = options.layer_by_layer.then(|| LayerArrivals::new(destination.num_layers()));
        let (job, task, end) = match begin(core, JobOrigin::Caller, options, keys.len()) {
            Ok(begun) => begun,
            Err(cause) => return Err(refuse(core, guard, cause)),
        };
        if let Some(layers) = layers {
            task.control.report_layers(layers);
        }
        task.guard.set(guard);
        let destination = Arc::new(destination);
        core.executor.spawn(async move {
            let results = get::run(&task, &keys, &destination).await;
            end.finish(results);
        });
        Ok(job)
    }

    /// Copies blocks to a faster tier of memory, so that a later get finds them there.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoSuchTier`], [`StoreError::NotAMemoryTier`], and the errors of keys, groups and
    /// queues.
    pub fn promote<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        tier: TierId,
        options: JobOptions,
    ) -> Result<Job, StoreError> {
        let core = self.core();
        core.check()?;
        core.group(options.group)?;
        if core.tier(tier)?.is_disk() {
            return Err(StoreError::NotAMemoryTier { tier });
        }
        let keys = Keys::new(core, options.group, keys)?;
        let begun = begin(core, JobOrigin::Caller, options, keys.len())?;
        Ok(start(begun, move |task| async move { load::promote(&task, &keys, tier).await }))
    }

    /// Removes blocks from all tiers. They are absent when this call returns. The job ends when the
    /// removal is durable, so that the blocks stay absent after a restart. A put of such a key that is
    /// in progress stores nothing. A later put of the key waits for it, and stores its block.
    ///
    /// # Errors
    ///
    /// The errors of keys and groups.
    pub fn remove<K: AsRef<[u8]>>(&self, group: u16, keys: &[K]) -> Result<Job, StoreError> {
        self.remove_with(keys, JobOptions::new().group(group))
    }

    /// As [`remove`](Self::remove), with options.
    ///
    /// # Errors
    ///
    /// The errors of keys, groups and queues.
    pub fn remove_with<K: AsRef<[u8]>>(
        &self,
        keys: &[K],
        options: JobOptions,
    ) -> Result<Job, StoreError> {
        let core = self.core();
        core.check()?;
        core.group(options.group)?;
        let keys = Keys::new(core, options.group, keys)?;
        let begun = begin(core, JobOrigin::Caller, options, keys.len())?;
        Ok(start(begun, |task| async move { removal::remove(&task, &keys).await }))
    }

    /// Removes all blocks. When the job has ended, the store is empty, also after a restart. Jobs that
    /// run meanwhile end; what they put is gone.
    ///
    /// # Errors
    ///
    /// [`StoreError::Closed`] and [`StoreError::Forked`].
    pub fn clear(&self) -> Result<Job, StoreError> {
        self.core().check()?;
        let begun = begin(self.core(), JobOrigin::Caller, JobOptions::new(), 1)?;
        Ok(start(begun, |task| async move { vec![removal::clear(&task).await] }))
    }

    /// Makes all blocks durable whose puts had ended before the call.
    ///
    /// The job ends with [`NoRoom::TierTooSmall`](crate::NoRoom::TierTooSmall) if memory has more blocks
    /// than fit on disk.
    ///
    /// # Errors
    ///
    /// [`StoreError::Closed`] and [`StoreError::Forked`].
    pub fn sync(&self) -> Result<Job, StoreError> {
        self.core().check()?;
        let begun = begin(self.core(), JobOrigin::Caller, JobOptions::new(), 1)?;
        Ok(start(begun, |task| async move { vec![write_back::sync(&task).await] }))
    }
}

fn refuse<G>(core: &StoreCore, guard: G, cause: StoreError) -> Refused<G> {
    count(&core.counters.refused_jobs, 1);
    Refused { guard, cause }
}

fn check<K: AsRef<[u8]>>(
    core: &Arc<StoreCore>,
    keys: &[K],
    blocks: Blocks,
    options: &JobOptions,
    usage: PayloadUse,
) -> Result<(Keys, Payload), StoreError> {
    core.check()?;
    let group = options.group;
    let payload = Payload::new(core, group, (keys.len(), blocks), usage)?;
    payload.check_order(options.device_order.is_some())?;
    let keys = match usage {
        PayloadUse::Source => Keys::new(core, group, keys)?,
        PayloadUse::Destination => Keys::to_find(core, group, keys)?,
    };
    Ok((keys, payload))
}
