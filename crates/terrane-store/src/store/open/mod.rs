//! Opens a store: the builder, the checks of its parts, its tiers, and the reload of its blocks.

pub(crate) mod builder;
pub(crate) mod reload;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Instant;

use terrane_core::convert::to_usize;
use terrane_core::metrics::{HISTOGRAM_CELLS, ShardedCounters};
use terrane_core::sync::lock;
use terrane_core::{Alignment, ByteCount, OwnerProcess};
use terrane_transfer::{Endpoint, Slots, TransferManager};

use crate::disk::{
    Catalog, CatalogOptions, Directory, GroupSlots, LiveRecords, MOST_GROUPS, Placement, Recovered,
    Stripes, acquire_striped, placement, random_secret,
};
use crate::error::StoreError;
use crate::eviction::{EvictionPolicy, Lru, S3Fifo};
use crate::key::KeyHasher;
use crate::slab::{SlabOptions, Slabs};
use crate::store::Store;
use crate::store::gate::Gate;
use crate::store::group::{EndpointFacts, GroupInfo, shares};
use crate::store::job::executor::Executor;
use crate::store::key_names::KeyNames;
use crate::store::metrics::counters::StoreCounters;
use crate::store::open::builder::{
    AllocateLayout, DiskTier, EvictionKind, Recovery, StoreBuilder, TierMemory, WritePolicy,
};
use crate::store::open::reload::reload;
use crate::store::query::event::Subscribers;
use crate::store::query::presence::TierId;
use crate::store::removal::recent::Recent;
use crate::store::sharded::Sharded;
use crate::store::shared::{JobTable, StoreCore};
use crate::store::slot_table::{DirtyBlocks, SlotTable};
use crate::store::tier::counters::TierCounters;
use crate::store::tier::{DiskParts, Tier, TierBlocks};
use crate::store::upkeep::maintenance::Maintenance;

const MOST_MEMORY_TIERS: usize = 8;

/// A store that has more journals writes a checkpoint when it is opened. Each session leaves one, and an
/// opening reads all of them.
const MOST_JOURNALS: u64 = 16;

/// Slots on disk are multiples of this.
const DISK_ALIGNMENT: u64 = 4096;

/// A tier before its slot tables exist.
struct TierPlan {
    name: String,
    memory: Vec<TierBlocks>,
    slots: Vec<u32>,
    slot_bytes: Vec<u64>,
    dirty: DirtyBlocks,
}

impl StoreBuilder {
    /// Opens the store, and finds the blocks of earlier sessions.
    ///
    /// # Errors
    ///
    /// [`StoreError`] names the part that is missing or too small, the system's error, or the owner
    /// of the directory.
    pub fn open(self) -> Result<(Store, Recovery), StoreError> {
        let (core, recovery) = assemble(self)?;
        if let Err(error) = start(&core) {
            abandon(&core);
            return Err(error);
        }
        Ok((Store::new(core), recovery))
    }
}

/// Makes the parts of the store, without its threads.
fn assemble(builder: StoreBuilder) -> Result<(Arc<StoreCore>, Recovery), StoreError> {
    let begun = Instant::now();
    let mut groups = groups(&builder)?;
    let mut plans = memory_plans(&builder, &groups)?;
    let disk = match &builder.disk {
        Some(disk) => {
            let (plan, parts, recovered) = open_disk(&builder, disk, &groups)?;
            for (number, group) in (0_u16..).zip(&mut groups) {
                group.slot_bytes = parts.slabs.slot_bytes(number);
            }
            plans.push(plan);
            Some((parts, recovered))
        }
        None => None,
    };
    let is_given_manager = builder.manager.is_some();
    let manager = match builder.manager {
        Some(manager) => Some(manager),
        None if builder.memory_tiers.is_empty() => None,
        None => Some(TransferManager::builder().host()?.build()),
    };
    let names = KeyNames::new(builder.keep_keys);
    let (parts, mut recovered) = disk.unzip();
    let recovery = recovered.as_ref().map(recovery_of).unwrap_or_default();
    let secret = match &parts {
        Some(parts) => parts.catalog.secret(),
        None => random_secret().map_err(|source| StoreError::Random { source })?,
    };
    let live = recovered.as_mut().map(|recovered| std::mem::take(&mut recovered.live));
    let core = Arc::new_cyclic(|core| {
        let make = |(number, plan)| tier(number, plan, builder.eviction, core);
        let tiers: Vec<Tier> = (0_u8..).zip(plans).map(make).collect();
        let threads = thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        if let Some((tier, live)) = tiers.last().filter(|tier| tier.is_disk()).zip(live) {
            reload(&tier.tables, live, &names, threads);
        }
        tiers.iter().flat_map(|tier| &tier.tables).for_each(|table| table.start(threads));
        StoreCore {
            owner: OwnerProcess::current(),
            hasher: KeyHasher::new(&secret),
            groups,
            tiers,
            disk: parts,
            manager,
            is_given_manager,
            policy: match builder.write_policy {
                WritePolicy::AfterUses(0) => WritePolicy::Through,
                policy => policy,
            },
            close_within: builder.close_within,
            claims: Arc::default(),
            removed_keys: Arc::default(),
            order: Sharded::default(),
            gate: Gate::default(),
            executor: Executor::new(),
            maintenance: Maintenance::default(),
            counters: StoreCounters::default(),
            job_times: ShardedCounters::new(HISTOGRAM_CELLS),
            names,
            subscribers: Subscribers::default(),
            recent: Recent::default(),
            jobs: JobTable::default(),
            threads: Mutex::default(),
            resizing: Mutex::default(),
            is_reported_read_only: AtomicBool::new(false),
        }
    });
    let journals = recovered.map_or(0, |recovered| recovered.journals);
    if journals > MOST_JOURNALS && core.disk.as_ref().is_some_and(|disk| !disk.is_read_only) {
        core.maintenance.request_checkpoint();
    }
    Ok((core, Recovery { took: begun.elapsed(), ..recovery }))
}

/// Closes a store whose threads did not all start. It begins no job, because no thread would end it.
fn abandon(core: &StoreCore) {
    core.jobs.close();
    core.jobs.refuse_internal();
    core.maintenance.stop(Instant::now());
    if let Some(disk) = &core.disk {
        disk.slabs.close(Instant::now());
    }
    core.executor.stop();
    for thread in std::mem::take(&mut *lock(&core.threads)) {
        if thread.join().is_err() {
            tracing::error!("a thread of the store panicked");
        }
    }
}

fn start(core: &Arc<StoreCore>) -> Result<(), StoreError> {
    let tasks = core.executor.start()?;
    lock(&core.threads).push(tasks);
    let upkeep = core.start_upkeep()?;
    lock(&core.threads).push(upkeep);
    Ok(())
}

fn groups(builder: &StoreBuilder) -> Result<Vec<GroupInfo>, StoreError> {
    let (groups, tiers) = (builder.groups.len(), builder.memory_tiers.len());
    let all = tiers + usize::from(builder.disk.is_some());
    if groups == 0 || groups > MOST_GROUPS || tiers > MOST_MEMORY_TIERS || all == 0 {
        return Err(StoreError::GroupOrTierCount { groups, tiers: all });
    }
    for (index, group) in builder.groups.iter().enumerate() {
        let (bytes, limit) = (group.block_bytes, u64::from(u32::MAX) - DISK_ALIGNMENT);
        if bytes == 0 || bytes > limit {
            return Err(StoreError::BlockLength { index, bytes, limit });
        }
    }
    let mut groups: Vec<GroupInfo> = builder.groups.iter().map(GroupInfo::new).collect();
    if builder.disk.is_some() {
        for group in &mut groups {
            group.slot_bytes = group.block_bytes.next_multiple_of(DISK_ALIGNMENT);
        }
    }
    Ok(groups)
}

/// The number of slots in a share of a tier.
fn slots_in((name, group): (&str, usize), bytes: u64, slot_bytes: u64) -> Result<u32, StoreError> {
    let slots = u32::try_from(bytes / slot_bytes).ok().filter(|&slots| slots > 0);
    slots.ok_or_else(|| StoreError::TierTooSmall {
        tier: name.to_owned(),
        group,
        bytes: ByteCount::new(bytes),
        slot_bytes: ByteCount::new(slot_bytes),
    })
}

fn memory_plans(builder: &StoreBuilder, groups: &[GroupInfo]) -> Result<Vec<TierPlan>, StoreError> {
    let last = builder.memory_tiers.len().saturating_sub(1);
    let mut plans = Vec::new();
    for (number, tier) in builder.memory_tiers.iter().enumerate() {
        let endpoints = match &tier.memory {
            TierMemory::Endpoints(endpoints) => endpoints.clone(),
            TierMemory::Allocated(bytes, allocate) => {
                own_endpoints(&tier.name, *bytes, groups, &**allocate)?
            }
        };
        if endpoints.len() != groups.len() {
            return Err(StoreError::EndpointCount {
                tier: tier.name.clone(),
                endpoints: endpoints.len(),
                groups: groups.len(),
            });
        }
        let mut memory = Vec::new();
        for (number, (endpoint, group)) in endpoints.into_iter().zip(groups).enumerate() {
            let facts = EndpointFacts::of(&endpoint);
            if !group.fits(&facts) || facts.block_bytes < group.block_bytes {
                return Err(StoreError::OtherShape { group: number });
            }
            let ids = Slots::new(&endpoint)?;
            let ids = ids.take(ids.total())?;
            memory.push(TierBlocks { endpoint, facts, _ids: ids });
        }
        if let Some(device) = memory.iter().find(|blocks| !blocks.facts.is_host)
            && number == last
            && builder.disk.is_some()
        {
            return Err(StoreError::NeedsHostTier { kind: device.endpoint.kind() });
        }
        let geometry = |blocks: &TierBlocks| blocks.endpoint.layout().geometry().clone();
        let has_slower = number < last || builder.disk.is_some();
        plans.push(TierPlan {
            name: tier.name.clone(),
            slots: memory.iter().map(|blocks| geometry(blocks).num_blocks()).collect(),
            slot_bytes: groups.iter().map(GroupInfo::own_stride).collect(),
            memory,
            dirty: match builder.write_policy {
                _ if !has_slower => DirtyBlocks::None,
                WritePolicy::AfterUses(1..) => DirtyBlocks::MayBeLost,
                _ => DirtyBlocks::MustBeWritten,
            },
        });
    }
    Ok(plans)
}

fn own_endpoints(
    name: &str,
    bytes: ByteCount,
    groups: &[GroupInfo],
    allocate: &AllocateLayout,
) -> Result<Vec<Endpoint>, StoreError> {
    let endpoint = |(number, (group, share)): (usize, (&GroupInfo, u64))| {
        let blocks = slots_in((name, number), share, group.own_stride())?;
        let geometry = group.own_geometry(blocks)?.with_block_alignment(Alignment::PAGE);
        Endpoint::new(allocate(geometry)?).map_err(|source| StoreError::MemoryInUse {
            tier: name.to_owned(),
            group: number,
            source: Box::new(source),
        })
    };
    groups.iter().zip(shares(groups, bytes)).enumerate().map(endpoint).collect()
}

fn open_disk(
    builder: &StoreBuilder,
    disk: &DiskTier,
    groups: &[GroupInfo],
) -> Result<(TierPlan, DiskParts, Recovered), StoreError> {
    let namespace = builder.namespace.as_ref().ok_or(StoreError::NoNamespace)?;
    if disk.slabs.read_only && !builder.persistent {
        return Err(StoreError::ReadOnlyNotPersistent);
    }
    if disk.directories.is_empty() {
        return Err(StoreError::NoDirectory);
    }
    let folder = |directory: &PathBuf| directory.join(namespace.name());
    let folders: Vec<PathBuf> = disk.directories.iter().map(folder).collect();
    // The catalog checks this again under its lock. Here no folder has been created yet.
    let recorded = placement(&disk.directories, namespace.name())?;
    let open_folder =
        |directory: &PathBuf| Directory::open(directory, namespace.name()).map(Arc::new);
    let opened = disk.directories.iter().map(open_folder).collect::<Result<Vec<_>, _>>()?;
    let folder_locks = acquire_striped(&opened)?;
    let mut options = SlabOptions {
        max_writes_while_reads_wait: builder.max_writes_while_reads_wait,
        slot_alignment: recorded.and_then(Placement::alignment),
        ..disk.slabs
    };
    // A file system may need larger distances between slots than those of the catalog. A new store has no
    // slab files to ask.
    let read_only = options.read_only && recorded.is_some();
    let granule = Slabs::granule(&folders, &SlabOptions { read_only, ..options })?;
    options.slot_alignment = Some(granule);
    let stripes = opened.iter().skip(1).fold(Stripes::new(granule), |stripes, folder| {
        stripes.also_in(Arc::clone(folder) as _, folder.path())
    });
    let mut slots = Vec::new();
    let shared = groups.iter().zip(shares(groups, disk.bytes));
    for ((number, (info, share)), group) in (0_u32..).zip(shared).zip(&builder.groups) {
        let stride = info.slot_bytes.next_multiple_of(granule.get());
        slots.push(GroupSlots {
            slot_bytes: info.slot_bytes,
            slots: slots_in(("disk", to_usize(number.into())), share, stride)?,
            fingerprint: group.fingerprint(number),
        });
    }
    let keep = CatalogOptions { keep_keys: builder.keep_keys, recovery_threads: None };
    let [files, ..] = opened.as_slice() else { return Err(StoreError::NoDirectory) };
    let (catalog, mut recovered) = Catalog::open_striped(
        Arc::clone(files) as _,
        files.path(),
        namespace,
        &slots,
        keep,
        &stripes,
    )?;
    let slabs = Slabs::open(&folders, &slots, &options)?;
    // Blocks that were dropped may be usable again in a larger tier.
    if !builder.persistent && recovered.found + recovered.dropped > 0 {
        catalog.clear()?;
        recovered.live = LiveRecords::default();
        recovered.found = 0;
    }
    let plan = TierPlan {
        name: String::from("disk"),
        memory: Vec::new(),
        slots: slots.iter().map(|group| group.slots).collect(),
        slot_bytes: (0_u16..).zip(&slots).map(|(group, _)| slabs.slot_bytes(group)).collect(),
        dirty: DirtyBlocks::None,
    };
    let is_read_only = disk.slabs.read_only;
    let parts = DiskParts { slabs, catalog, is_read_only, _folder_locks: folder_locks };
    Ok((plan, parts, recovered))
}

fn recovery_of(recovered: &Recovered) -> Recovery {
    Recovery {
        found: recovered.found,
        torn: recovered.torn,
        damaged: recovered.damaged,
        dropped: recovered.dropped,
        superblock_repaired: recovered.superblock_repaired,
        bytes: ByteCount::new(recovered.bytes),
        took: recovered.took,
    }
}

fn tier(number: u8, plan: TierPlan, eviction: EvictionKind, core: &Weak<StoreCore>) -> Tier {
    let TierPlan { name, memory, slots, slot_bytes, dirty } = plan;
    let id = TierId::new(number);
    let table = |(group, slots): (u16, u32)| {
        let policy: Box<dyn EvictionPolicy> = match eviction {
            EvictionKind::S3Fifo => Box::new(S3Fifo::new(slots)),
            EvictionKind::Lru => Box::new(Lru::new(slots)),
        };
        let memory = memory.get(usize::from(group));
        let orphaned = memory.map(|memory| memory.endpoint.orphaned_claims());
        Arc::new(SlotTable::new(
            (id, group),
            slots,
            policy,
            dirty,
            orphaned,
            Weak::clone(core) as _,
        ))
    };
    let tables = (0_u16..).zip(slots).map(table).collect();
    Tier { id, name, tables, memory, slot_bytes, counters: TierCounters::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Namespace;
    use crate::store::open::builder::BlockGroup;

    fn builder(directory: &std::path::Path) -> StoreBuilder {
        let disk = DiskTier::new(directory, ByteCount::kib(64));
        let namespace = Namespace::new("model", [("model", "llama")]).unwrap();
        Store::builder().group(BlockGroup::new("kv", 4096)).disk(disk).namespace(namespace)
    }

    #[test]
    fn a_store_whose_threads_do_not_start_closes_and_leaves_its_directory_free() {
        let directory = tempfile::tempdir().unwrap();
        for starts_executor in [false, true] {
            let (core, _) = assemble(builder(directory.path())).unwrap();
            if starts_executor {
                let thread = core.executor.start().unwrap();
                lock(&core.threads).push(thread);
            }
            abandon(&core);
            assert!(matches!(core.check(), Err(StoreError::Closed)));
            drop(core);
        }
        builder(directory.path()).open().unwrap().0.close(Instant::now());
    }
}
