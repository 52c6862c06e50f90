//! From a call to a running job.

use std::sync::Arc;

use crate::error::StoreError;
use crate::store::blocks::Blocks;
use crate::store::direct;
use crate::store::get;
use crate::store::job::{Job, Refused};
use crate::store::load;
use crate::store::options::JobOptions;
use crate::store::presence::TierId;
use crate::store::put;
use crate::store::removal;
use crate::store::request::{Keys, Payload, PayloadUse};
use crate::store::shared::{JobOrigin, StoreCore};
use crate::store::task::{begin, begin_without_task};
use crate::store::tier::count;
use crate::store::write_back;

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

pub(crate) fn put<K: AsRef<[u8]>, G: Send + 'static>(
    core: &Arc<StoreCore>,
    keys: &[K],
    source: Blocks,
    options: JobOptions,
    guard: G,
) -> Result<Job, Refused<G>> {
    let begun = check(core, keys, source, &options, PayloadUse::Source).and_then(|checked| {
        let begun = begin(core, options, keys.len())?;
        Ok((checked, begun))
    });
    let ((keys, source), (job, task, end)) = match begun {
        Ok(begun) => begun,
        Err(cause) => return Err(refuse(core, guard, cause)),
    };
    task.guard.set(guard);
    let source = Arc::new(source);
    core.executor.spawn(async move {
        let results = put::run(&task, &keys, source).await;
        end.finish(results);
    });
    Ok(job)
}

pub(crate) fn get<K: AsRef<[u8]>, G: Send + 'static>(
    core: &Arc<StoreCore>,
    keys: &[K],
    destination: Blocks,
    options: JobOptions,
    guard: G,
) -> Result<Job, Refused<G>> {
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
    let (job, task, end) = match begin(core, options, keys.len()) {
        Ok(begun) => begun,
        Err(cause) => return Err(refuse(core, guard, cause)),
    };
    task.guard.set(guard);
    let destination = Arc::new(destination);
    core.executor.spawn(async move {
        let results = get::run(&task, &keys, &destination).await;
        end.finish(results);
    });
    Ok(job)
}

pub(crate) fn promote<K: AsRef<[u8]>>(
    core: &Arc<StoreCore>,
    keys: &[K],
    tier: TierId,
    options: JobOptions,
) -> Result<Job, StoreError> {
    core.check()?;
    core.group(options.group)?;
    let tiers = core.tiers.len();
    let Some(found) = core.tiers.get(tier.index()) else {
        return Err(StoreError::NoSuchTier { tier, tiers });
    };
    if found.is_disk() {
        return Err(StoreError::NotAMemoryTier { tier });
    }
    let keys = Keys::new(core, options.group, keys)?;
    let (job, task, end) = begin(core, options, keys.len())?;
    core.executor.spawn(async move {
        let results = load::promote(&task, &keys, tier).await;
        end.finish(results);
    });
    Ok(job)
}

pub(crate) fn remove<K: AsRef<[u8]>>(
    core: &Arc<StoreCore>,
    keys: &[K],
    options: JobOptions,
) -> Result<Job, StoreError> {
    core.check()?;
    core.group(options.group)?;
    let keys = Keys::new(core, options.group, keys)?;
    let (job, task, end) = begin(core, options, keys.len())?;
    core.executor.spawn(async move {
        let results = removal::remove(&task, &keys).await;
        end.finish(results);
    });
    Ok(job)
}

pub(crate) fn clear(core: &Arc<StoreCore>) -> Result<Job, StoreError> {
    core.check()?;
    let (job, task, end) = begin(core, JobOptions::new(), 1)?;
    core.executor.spawn(async move {
        let result = removal::clear(&task).await;
        end.finish(vec![result]);
    });
    Ok(job)
}

pub(crate) fn sync(core: &Arc<StoreCore>) -> Result<Job, StoreError> {
    core.check()?;
    let (job, task, end) = begin(core, JobOptions::new(), 1)?;
    core.executor.spawn(async move {
        let result = write_back::sync(&task).await;
        end.finish(vec![result]);
    });
    Ok(job)
}
