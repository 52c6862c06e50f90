//! Changes that reduce the host memory.

use serde::{Deserialize, Serialize};
use terrane_core::ByteCount;
use terrane_layout::ElementFormat;
use terrane_layout::model::GroupKind;

use crate::error::PlanError;
use crate::plan::groups::{Demand, GroupPlan, context_bytes, group_plans, options};
use crate::plan::memory::{TierKind, TierPlan};
use crate::request::PlanRequest;

/// A change, and the host memory of all ranks after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Saving {
    /// The change.
    pub change: String,
    /// The host memory of all ranks before it.
    pub before: u64,
    /// The host memory of all ranks after it.
    pub after: u64,
}

impl Saving {
    /// The share that is saved: 0.2 is 20 %.
    #[must_use]
    pub fn share(&self) -> f64 {
        1.0 - self.after as f64 / self.before as f64
    }
}

/// The smallest share that a change must save.
const LEAST: f64 = 0.2;

/// The changes that save at least 20 %, the largest saving first.
pub(crate) fn savings(
    request: &PlanRequest,
    groups: &[GroupPlan],
    tiers: &[TierPlan],
    demand: Option<&Demand>,
) -> Result<Vec<Saving>, PlanError> {
    let Some(host) = tiers.iter().find(|tier| tier.kind == TierKind::Host) else {
        return Ok(Vec::new());
    };
    let ranks = u64::from(request.tensor_parallel);
    let before = host.used_bytes.saturating_mul(ranks);
    let saving = |change: String, after: u64| Saving { change, before, after };
    let mut savings = Vec::new();
    // The same blocks in another element format.
    if request.kv_element.is_none() {
        let narrow = options(request).kv_element(ElementFormat::Width(1));
        let narrow = request.model.geometry(&narrow)?;
        let narrow = group_plans(request, &narrow)?;
        let after = bytes_of(&narrow, host)?.saturating_mul(ranks);
        savings.push(saving(
            "store K and V in 8 bits (--kv-dtype fp8): the same tokens".into(),
            after,
        ));
    }
    // One copy of the caches that are equal on all ranks.
    if ranks > 1 {
        let geometry = request.model.geometry(&options(request))?;
        let is_shared = |kind| matches!(kind, GroupKind::Latent | GroupKind::Indexer);
        let shared = geometry.groups().iter().zip(&host.groups);
        let shared: u64 =
            shared.filter(|(group, _)| is_shared(group.kind())).map(|(_, tier)| tier.bytes).sum();
        let after = before.saturating_sub(shared.saturating_mul(ranks - 1));
        savings.push(saving(
            "keep one copy of the latents, which are equal on all ranks".into(),
            after,
        ));
    }
    // The blocks that windows can still reach.
    if let Some(demand) = demand {
        let whole = groups.iter().map(|group| GroupPlan { window: None, ..group.clone() });
        let whole: Vec<GroupPlan> = whole.collect();
        let all = context_bytes(&whole, demand.context, request.block_tokens)?.get();
        let after = u128::from(before) * u128::from(demand.bytes_per_user) / u128::from(all.max(1));
        let after = u64::try_from(after).unwrap_or(before);
        savings.push(saving("keep only the blocks that windows still reach".into(), after));
    }
    let fewer = host.blocks.saturating_mul(4) / 5;
    let block: u64 =
        groups.iter().filter(|group| !group.is_state).map(|group| group.block_bytes).sum();
    let after =
        before.saturating_sub((host.blocks - fewer).saturating_mul(block).saturating_mul(ranks));
    let tokens = fewer.saturating_mul(request.block_tokens.into());
    savings.push(saving(format!("keep 20 % fewer tokens: {tokens}"), after));
    savings.retain(|saving| saving.share() >= LEAST - 1e-3);
    savings.sort_by_key(|saving| saving.after);
    Ok(savings)
}

/// The bytes of the tier's blocks and states with other groups, without padding.
fn bytes_of(groups: &[GroupPlan], tier: &TierPlan) -> Result<u64, PlanError> {
    let mut sum = ByteCount::ZERO;
    for group in groups {
        let count = if group.is_state { tier.states } else { tier.blocks };
        sum = sum.checked_add(ByteCount::new(group.block_bytes).checked_mul("blocks", count)?)?;
    }
    Ok(sum.get())
}
