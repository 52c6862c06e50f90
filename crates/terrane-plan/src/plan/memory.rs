//! The layouts of the tiers: the number of their blocks, and the bytes of padding.

use serde::{Deserialize, Serialize};
use terrane_core::{Alignment, ByteCount, Limits};
use terrane_layout::model::{CacheGroup, ModelGeometry};
use terrane_layout::{BlockDimension, LayoutError, LayoutKind, LayoutPlan};

use crate::error::PlanError;
use crate::machine::HostFacts;
use crate::plan::groups::{Demand, GroupPlan, options};
use crate::request::PlanRequest;

/// The largest registration of pinned memory. Larger memory needs several registrations.
pub(crate) const LARGEST_REGISTRATION: u64 = 64 << 30;

pub(crate) const HUGE_PAGE: u64 = 2 << 20;

/// The most blocks of a layout that a plan searches. A tier for so many is refused as too large.
const MOST_BLOCKS: u32 = u32::MAX - 1;

/// A tier, on one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierPlan {
    /// `device`, `host`, or the directory of a disk.
    pub name: String,
    /// The kind of tier.
    pub kind: TierKind,
    /// The bytes of the request for this rank.
    pub given_bytes: u64,
    /// The bytes of the layouts.
    pub used_bytes: u64,
    /// Blocks of every group with tokens.
    pub blocks: u64,
    /// Tokens of these blocks, if every group keeps every token.
    pub tokens: u64,
    /// Sequences whose states fit in addition to the blocks; 0 if no group has states. A tier that
    /// cannot hold all users has the states of those whose complete context fits, and at least one.
    pub states: u64,
    /// Users whose complete context fits in this tier alone, if the request has a context.
    pub users: Option<u64>,
    /// The layout of each group.
    pub groups: Vec<TierGroup>,
    /// The bytes that are not part of a block, by cause.
    pub padding: Padding,
}

/// The kind of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TierKind {
    /// The memory of a device: a region for each layer.
    Device,
    /// Host memory in huge pages: a block is contiguous.
    Host,
    /// A file: a block is contiguous and begins at a multiple of 4,096 bytes, for direct I/O.
    Disk,
}

/// The layout of a group in a tier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierGroup {
    /// The group, counted from 0.
    pub group: u64,
    /// The order of its axes.
    pub layout: String,
    /// Its regions.
    pub regions: u32,
    /// The bytes of a block with its padding.
    pub block_stride: u64,
    /// Its bytes with all padding.
    pub bytes: u64,
}

/// The bytes of a tier that are not part of a block, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Padding {
    /// The blocks themselves.
    pub block_bytes: u64,
    /// Between blocks: the alignment of direct I/O.
    pub block_alignment: u64,
    /// Between regions and at the end: alignment, and whole pages.
    pub regions_and_pages: u64,
    /// Unused bytes, which are fewer than one more block needs.
    pub remainder: u64,
    /// The bytes that a pool with size classes of powers of two would waste for the same blocks.
    pub powers_of_two: u64,
}

/// The resources of the system that the host tier needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostNeeds {
    /// Huge pages of 2 MiB for all ranks.
    pub huge_pages: u64,
    /// The command that reserves them. `vm.nr_hugepages` is the machine's total. If the machine is
    /// known, the value includes the pages in use, and is at least the present total.
    pub sysctl: String,
    /// Registrations with the driver on one rank, of at most 64 GiB each.
    pub registrations: u64,
    /// Bytes that a rank locks if it registers the tier for RDMA. Registration with the CUDA driver
    /// does not count against `RLIMIT_MEMLOCK`.
    pub memlock_bytes: u64,
    /// Bytes in `/dev/shm` if vLLM's native offloading uses this memory: its file there has the
    /// size of the whole tier. The tiers of Terrane use private memory.
    pub shm_bytes: u64,
}

impl TierKind {
    fn layout(self) -> LayoutKind {
        match self {
            Self::Device => LayoutKind::LayerSeparate { block_dimension: BlockDimension::First },
            Self::Host | Self::Disk => LayoutKind::FullyContiguous,
        }
    }

    fn block_alignment(self) -> Alignment {
        match self {
            Self::Device | Self::Host => Alignment::BYTE,
            Self::Disk => Alignment::PAGE,
        }
    }

    fn limits(self) -> Limits {
        let granule = match self {
            // The driver maps device memory in units of 2 MiB.
            Self::Device | Self::Host => Alignment::HUGE_PAGE,
            Self::Disk => Alignment::PAGE,
        };
        Limits { granule, ..Limits::NONE }
    }

    /// The layout of a number of blocks of a group.
    pub(crate) fn plan(
        self,
        group: &CacheGroup,
        blocks: u32,
        block_tokens: u32,
    ) -> Result<LayoutPlan, LayoutError> {
        let config = group.layout_config(blocks, block_tokens)?;
        let config = config.with_block_alignment(self.block_alignment())?;
        LayoutPlan::new(&config, self.layout(), self.limits())
    }
}

impl PlanRequest {
    /// The layouts of the model's groups in a tier of this kind, with this many blocks each.
    ///
    /// # Errors
    ///
    /// [`PlanError::Model`] if the model's configuration, or this number of blocks, is refused.
    pub fn layouts(&self, kind: TierKind, blocks: u32) -> Result<Vec<LayoutPlan>, PlanError> {
        let geometry = self.model.geometry(&options(self))?;
        let plans =
            geometry.groups().iter().map(|group| kind.plan(group, blocks, self.block_tokens));
        plans.collect::<Result<_, _>>().map_err(|source: LayoutError| self.model.refused(source))
    }
}

/// All tiers of the request, from fast to slow.
pub(crate) fn tiers(
    request: &PlanRequest,
    geometry: &ModelGeometry,
    groups: &[GroupPlan],
    demand: Option<&Demand>,
) -> Result<Vec<TierPlan>, PlanError> {
    let ranks = u64::from(request.tensor_parallel.max(1));
    let of_rank = |bytes: ByteCount| ByteCount::new(bytes.get() / ranks);
    let device = request.device.map(|bytes| ("device".to_owned(), TierKind::Device, bytes));
    let host = request.host.map(|bytes| ("host".to_owned(), TierKind::Host, of_rank(bytes)));
    let disks = request.disks.iter();
    let disks = disks.map(|disk| (disk.directory.clone(), TierKind::Disk, of_rank(disk.bytes)));
    let planner = TierPlanner { request, geometry, groups, demand };
    device
        .into_iter()
        .chain(host)
        .chain(disks)
        .map(|(name, kind, given)| planner.plan_tier(name, kind, given))
        .collect()
}

struct TierPlanner<'a> {
    request: &'a PlanRequest,
    geometry: &'a ModelGeometry,
    groups: &'a [GroupPlan],
    demand: Option<&'a Demand>,
}

impl TierPlanner<'_> {
    fn plan_tier(
        &self,
        name: String,
        kind: TierKind,
        given: ByteCount,
    ) -> Result<TierPlan, PlanError> {
        let has_tokens = self.groups.iter().any(|group| !group.is_state);
        let has_states = self.groups.iter().any(|group| group.is_state);
        let users = self.users_within(kind, given)?;
        let fit = |counts: (u32, u32)| {
            self.plans(kind, counts)
                .is_ok_and(|plans| sum(&plans).is_some_and(|sum| sum <= given.get()))
        };
        // A state is useful only with the blocks of its sequence. So the tier has a state for each
        // user whose complete context fits, or one. The padding of regions may leave space for
        // fewer.
        let users_held = users.zip(self.demand).map_or(1, |(fit, demand)| fit.min(demand.users));
        // More users than `MOST_BLOCKS` have as many blocks, which are refused below.
        let most = u32::try_from(users_held.max(1)).unwrap_or(MOST_BLOCKS);
        let states = largest(most, |states| fit((1, states))).unwrap_or(1);
        // A model without tokens fills the tier with states.
        let counts = |units: u32| match (has_tokens, has_states) {
            (true, true) => (units, states),
            (true, false) => (units, 0),
            (false, _) => (0, units),
        };
        let Some(fitting) = largest(MOST_BLOCKS, |units| fit(counts(units))) else {
            let plans = self.plans(kind, counts(1)).map_err(|e| self.request.model.refused(e))?;
            let needed = ByteCount::new(sum(&plans).unwrap_or(u64::MAX));
            return Err(PlanError::TierTooSmall { tier: name, given, needed });
        };
        let (blocks, states) = counts(fitting);
        let plans =
            self.plans(kind, (blocks, states)).map_err(|e| self.request.model.refused(e))?;
        let used = sum(&plans).unwrap_or(given.get());
        if fitting == MOST_BLOCKS {
            let largest = ByteCount::new(used);
            return Err(PlanError::TierTooLarge { tier: name, given, largest });
        }
        Ok(TierPlan {
            kind,
            given_bytes: given.get(),
            used_bytes: used,
            blocks: blocks.into(),
            tokens: u64::from(blocks) * u64::from(self.request.block_tokens),
            states: states.into(),
            users,
            padding: padding(&plans, given.get().saturating_sub(used)),
            groups: plans.iter().map(|(group, plan)| tier_group(*group, plan)).collect(),
            name,
        })
    }

    /// The layouts of the groups with this many blocks and states.
    fn plans(
        &self,
        kind: TierKind,
        (blocks, states): (u32, u32),
    ) -> Result<Vec<(u64, LayoutPlan)>, LayoutError> {
        let groups = (0..).zip(self.geometry.groups()).zip(self.groups);
        let plans = groups.map(|((number, group), summary)| {
            let count = if summary.is_state { states } else { blocks };
            Ok((number, kind.plan(group, count, self.request.block_tokens)?))
        });
        plans.collect()
    }

    /// The number of users whose complete context fits in these bytes, with the block size of this
    /// tier.
    fn users_within(&self, kind: TierKind, given: ByteCount) -> Result<Option<u64>, PlanError> {
        let Some(demand) = self.demand else { return Ok(None) };
        let alignment = kind.block_alignment();
        let mut of_one = ByteCount::ZERO;
        for group in self.groups {
            let stride = ByteCount::new(group.block_bytes).align_up(alignment)?;
            let blocks = group.blocks_of(demand.context, self.request.block_tokens);
            of_one = of_one.checked_add(stride.checked_mul("blocks", blocks)?)?;
        }
        Ok(given.get().checked_div(of_one.get()))
    }
}

/// The largest count from 1 to `most` that fits, if 1 fits. If a count fits, every smaller one
/// does.
fn largest(most: u32, fits: impl Fn(u32) -> bool) -> Option<u32> {
    if !fits(1) {
        return None;
    }
    let (mut fitting, mut largest) = (1, most);
    while fitting < largest {
        let middle = largest - (largest - fitting) / 2;
        if fits(middle) { fitting = middle } else { largest = middle - 1 }
    }
    Some(fitting)
}

fn sum(plans: &[(u64, LayoutPlan)]) -> Option<u64> {
    plans.iter().try_fold(0_u64, |sum, (_, plan)| sum.checked_add(plan.base_bytes().get()))
}

fn tier_group(group: u64, plan: &LayoutPlan) -> TierGroup {
    let geometry = plan.geometry();
    let blocks = u64::from(geometry.num_blocks()).max(1);
    let report = plan.padding();
    let in_regions = report.block_bytes.get().saturating_add(report.block_padding.get());
    TierGroup {
        group,
        layout: geometry.label().to_string(),
        regions: geometry.region_count(),
        block_stride: in_regions / blocks,
        bytes: plan.base_bytes().get(),
    }
}

fn padding(plans: &[(u64, LayoutPlan)], remainder: u64) -> Padding {
    let mut padding = Padding { remainder, ..Padding::default() };
    for (_, plan) in plans {
        let report = plan.padding();
        let blocks = u64::from(plan.geometry().num_blocks());
        let block = plan.geometry().block_bytes().get();
        let rounded = block.checked_next_power_of_two().unwrap_or(block);
        padding.block_bytes = padding.block_bytes.saturating_add(report.block_bytes.get());
        padding.block_alignment =
            padding.block_alignment.saturating_add(report.block_padding.get());
        padding.regions_and_pages =
            padding.regions_and_pages.saturating_add(report.region_padding.get());
        padding.powers_of_two =
            padding.powers_of_two.saturating_add((rounded - block).saturating_mul(blocks));
    }
    padding
}

/// The resources of the system that the host tier needs.
pub(crate) fn host_needs(
    request: &PlanRequest,
    tiers: &[TierPlan],
) -> Result<Option<HostNeeds>, PlanError> {
    let Some(tier) = tiers.iter().find(|tier| tier.kind == TierKind::Host) else { return Ok(None) };
    let all =
        ByteCount::new(tier.used_bytes).checked_mul("ranks", request.tensor_parallel.into())?;
    let huge_pages = all.get().div_ceil(HUGE_PAGE);
    let facts = request.machine.as_ref().and_then(|machine| machine.host.as_ref());
    let reserved = |host: &HostFacts| Some((host.huge_pages?, host.free_huge_pages?));
    let total = facts.and_then(reserved).map_or(huge_pages, |(all, free)| {
        all.saturating_sub(free).saturating_add(huge_pages).max(all)
    });
    Ok(Some(HostNeeds {
        huge_pages,
        sysctl: format!("sudo sysctl -w vm.nr_hugepages={total}"),
        registrations: tier.groups.iter().map(registrations).sum(),
        memlock_bytes: tier.used_bytes,
        shm_bytes: request.host.map_or(0, ByteCount::get),
    }))
}

/// The number of registrations. A registration ends between two blocks.
fn registrations(group: &TierGroup) -> u64 {
    let stride = group.block_stride.max(1);
    let length = (LARGEST_REGISTRATION / stride).max(1).saturating_mul(stride);
    group.bytes.div_ceil(length)
}
