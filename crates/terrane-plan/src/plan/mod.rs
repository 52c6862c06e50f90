//! The plan: what a model needs on the tiers of a machine.

pub(crate) mod advice;
pub(crate) mod engines;
pub(crate) mod limits;
pub(crate) mod memory;
pub(crate) mod predictions;

use serde::{Deserialize, Serialize};
use terrane_core::ByteCount;
use terrane_layout::LayoutError;
use terrane_layout::model::{CacheGroup, GroupKind, ModelGeometry, ModelOptions};

use crate::error::PlanError;
use crate::plan::advice::Saving;
use crate::plan::engines::EngineOptions;
use crate::plan::limits::LimitHit;
use crate::plan::memory::{HostNeeds, TierPlan};
use crate::plan::predictions::Prediction;
use crate::request::PlanRequest;
use crate::trace::TraceReport;

/// What a model needs on the tiers of a machine. All bytes are those of one rank, unless a field says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Plan {
    /// The form of this value as JSON: `terrane.plan/1`.
    pub schema: String,
    /// The model.
    pub model: ModelSummary,
    /// The machine, if one was given.
    pub machine: Option<MachineSummary>,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Tokens of a chunk.
    pub chunk_tokens: u32,
    /// The groups of caches.
    pub groups: Vec<GroupPlan>,
    /// Bytes of a token in all groups.
    pub bytes_per_token: u64,
    /// Bytes of a sequence of any length in all groups: its states.
    pub bytes_per_sequence: u64,
    /// The tiers, from fast to slow.
    pub tiers: Vec<TierPlan>,
    /// What the users need, if context and users were given.
    pub demand: Option<Demand>,
    /// What the host tier needs from the system.
    pub host: Option<HostNeeds>,
    /// The limits of the machine that the plan exceeds.
    pub limits: Vec<LimitHit>,
    /// Predicted times.
    pub predictions: Vec<Prediction>,
    /// Changes that reduce the host memory by at least 20 %.
    pub savings: Vec<Saving>,
    /// Hit ratios, if a trace was given.
    pub trace: Option<TraceReport>,
    /// Options of serving engines to paste.
    pub engines: Vec<EngineOptions>,
}

/// The model of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSummary {
    /// Its name.
    pub name: String,
    /// Its model type.
    pub model_type: String,
    /// The source of its parameters; none for the caller's file.
    pub source: Option<String>,
    /// The date on which the source was read.
    pub date: Option<String>,
    /// Tensor-parallel ranks.
    pub tensor_parallel: u32,
}

/// The machine of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSummary {
    /// Its name.
    pub name: String,
    /// Its name for people.
    pub title: String,
    /// The origin of its figures.
    pub sources: Vec<String>,
    /// The date of its description.
    pub date: String,
}

/// A group of caches on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupPlan {
    /// Its kind, in words.
    pub kind: String,
    /// The tokens that its window or chunk holds, if it has one.
    pub window: Option<u32>,
    /// Whether it has a state for each sequence, and none for tokens.
    pub is_state: bool,
    /// Its layers.
    pub layers: u32,
    /// The first of them.
    pub first_layer: u32,
    /// KV heads.
    pub heads: u32,
    /// Bytes of one token, layer, and K or V. Of one state for a group of states.
    pub row_bytes: u64,
    /// Bytes of a token over its layers; 0 for states.
    pub bytes_per_token: u64,
    /// Bytes of a sequence over its layers; 0 for groups with tokens.
    pub bytes_per_sequence: u64,
    /// Bytes of a block, or of the states of a sequence.
    pub block_bytes: u64,
    /// Bytes of a chunk; 0 for states.
    pub chunk_bytes: u64,
}

/// What the users need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Demand {
    /// Tokens of a context.
    pub context: u64,
    /// Users.
    pub users: u64,
    /// Bytes of one context on one rank. A window keeps only the blocks that it reaches.
    pub bytes_per_user: u64,
    /// Bytes of all users on one rank.
    pub bytes: u64,
    /// Bytes of all users on all ranks.
    pub bytes_of_all_ranks: u64,
}

impl Plan {
    /// Makes a plan. It takes milliseconds, and reads nothing but the request.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if the model's configuration is refused, a number is out of range, or a tier is smaller than one
    /// block of every group.
    pub fn new(request: &PlanRequest) -> Result<Self, PlanError> {
        check(request)?;
        let geometry = request.model.geometry(&options(request))?;
        let groups = group_plans(request, &geometry)?;
        let demand = demand(request, &groups)?;
        let tiers = memory::tiers(request, &geometry, &groups, demand.as_ref())?;
        let host = memory::host_needs(request, &tiers)?;
        let sum = |of: fn(&GroupPlan) -> u64| groups.iter().map(of).sum();
        let source = request.model.source();
        let trace = request.trace.as_ref().map(|trace| {
            let capacities = tiers.iter().map(|tier| (tier.name.clone(), tier.blocks));
            trace.report(&capacities.collect::<Vec<_>>())
        });
        Ok(Self {
            schema: "terrane.plan/1".to_owned(),
            model: ModelSummary {
                name: request.model.name().to_owned(),
                model_type: geometry.model_type().to_owned(),
                source: source.map(|(source, _)| source.to_owned()),
                date: source.map(|(_, date)| date.to_owned()),
                tensor_parallel: request.tensor_parallel,
            },
            machine: request.machine.as_ref().map(|machine| MachineSummary {
                name: machine.name.clone(),
                title: machine.title.clone(),
                sources: machine.sources.clone(),
                date: machine.date.clone(),
            }),
            block_tokens: request.block_tokens,
            chunk_tokens: request.chunk_tokens,
            bytes_per_token: sum(|group| group.bytes_per_token),
            bytes_per_sequence: sum(|group| group.bytes_per_sequence),
            limits: limits::hit(request, &tiers, host.as_ref()),
            predictions: predictions::predict(request, &groups, &tiers, demand.as_ref()),
            savings: advice::savings(request, &groups, &tiers, demand.as_ref())?,
            engines: engines::options(request, &groups),
            groups,
            tiers,
            demand,
            host,
            trace,
        })
    }
}

fn options(request: &PlanRequest) -> ModelOptions {
    let options = ModelOptions::new().tensor_parallel(request.tensor_parallel);
    request.kv_element.map_or(options, |element| options.kv_element(element))
}

fn check(request: &PlanRequest) -> Result<(), PlanError> {
    let out_of_range =
        |name, value: u64, expected| Err(PlanError::OutOfRange { name, value, expected });
    let (block, chunk) = (request.block_tokens, request.chunk_tokens);
    if block == 0 || block > 65_536 {
        return out_of_range("the block size", block.into(), "1 to 65,536 tokens");
    }
    if chunk == 0 || !chunk.is_multiple_of(block) {
        return out_of_range(
            "the chunk size",
            chunk.into(),
            "a multiple of the block size in tokens",
        );
    }
    for (name, value) in [("the context", request.context), ("the number of users", request.users)]
    {
        if let Some(value) = value
            && !(1..=1 << 40).contains(&value)
        {
            return out_of_range(name, value, "1 to 2^40");
        }
    }
    match (request.context, request.users) {
        (Some(_), None) => {
            Err(PlanError::Incomplete { given: "the context", missing: "the number of users" })
        }
        (None, Some(_)) => {
            Err(PlanError::Incomplete { given: "the number of users", missing: "the context" })
        }
        _ => Ok(()),
    }
}

fn group_plans(
    request: &PlanRequest,
    geometry: &ModelGeometry,
) -> Result<Vec<GroupPlan>, PlanError> {
    let one = |group: &CacheGroup| -> Result<GroupPlan, LayoutError> {
        let is_state = group.kind() == GroupKind::State;
        let token = group.bytes_per_token()?;
        let row = group.row_bytes().or(group.state_bytes()).unwrap_or(ByteCount::ZERO);
        Ok(GroupPlan {
            kind: group.kind().to_string(),
            window: match group.kind() {
                GroupKind::SlidingAttention { window } => Some(window),
                GroupKind::ChunkedAttention { chunk } => Some(chunk),
                _ => None,
            },
            is_state,
            layers: u32::try_from(group.layers().len()).unwrap_or(u32::MAX),
            first_layer: group.layers().first().copied().unwrap_or(0),
            heads: group.heads(),
            row_bytes: row.get(),
            bytes_per_token: token.get(),
            bytes_per_sequence: group.bytes_per_sequence()?.get(),
            block_bytes: group.layout_config(1, request.block_tokens)?.block_bytes().get(),
            chunk_bytes: token.checked_mul("tokens", request.chunk_tokens.into())?.get(),
        })
    };
    geometry.groups().iter().map(|group| one(group).map_err(|e| request.model.refused(e))).collect()
}

impl GroupPlan {
    /// The blocks of one context. The tokens of a window begin anywhere in a block, so it may reach one block more.
    pub(crate) fn blocks_of(&self, context: u64, block_tokens: u32) -> u64 {
        if self.is_state {
            return 1;
        }
        let all = context.div_ceil(block_tokens.into());
        self.window
            .map_or(all, |window| all.min(u64::from(window).div_ceil(block_tokens.into()) + 1))
    }
}

fn demand(request: &PlanRequest, groups: &[GroupPlan]) -> Result<Option<Demand>, PlanError> {
    let (Some(context), Some(users)) = (request.context, request.users) else { return Ok(None) };
    let bytes_per_user = context_bytes(groups, context, request.block_tokens)?;
    let bytes = bytes_per_user.checked_mul("users", users)?;
    let all = bytes.checked_mul("ranks", request.tensor_parallel.into())?;
    Ok(Some(Demand {
        context,
        users,
        bytes_per_user: bytes_per_user.get(),
        bytes: bytes.get(),
        bytes_of_all_ranks: all.get(),
    }))
}

/// The bytes of one context in all groups.
pub(crate) fn context_bytes(
    groups: &[GroupPlan],
    context: u64,
    block_tokens: u32,
) -> Result<ByteCount, PlanError> {
    let each = groups.iter().map(|group| {
        ByteCount::new(group.block_bytes)
            .checked_mul("blocks", group.blocks_of(context, block_tokens))
    });
    let each: Vec<ByteCount> = each.collect::<Result<_, _>>()?;
    let sum: Result<ByteCount, terrane_core::SizeOverflow> = each.into_iter().collect();
    Ok(sum?)
}
