//! The plan: the memory that a model needs on the tiers of a machine.

pub(crate) mod advice;
pub(crate) mod engines;
pub(crate) mod groups;
pub(crate) mod limits;
pub(crate) mod memory;
pub(crate) mod predictions;

use serde::{Deserialize, Serialize};

use crate::error::PlanError;
use crate::plan::advice::Saving;
use crate::plan::engines::EngineOptions;
use crate::plan::groups::{Demand, GroupPlan, demand, group_plans, options};
use crate::plan::limits::LimitHit;
use crate::plan::memory::{HostNeeds, TierPlan};
use crate::plan::predictions::Prediction;
use crate::request::PlanRequest;
use crate::trace::TraceReport;

/// The memory that a model needs on the tiers of a machine. All bytes are for one rank, unless the
/// field's documentation states otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Plan {
    /// The schema of this value as JSON: `terrane.plan/1`.
    pub schema: String,
    /// The model.
    pub model: ModelSummary,
    /// The machine, if the request has one.
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
    /// The need of the users, if the request has a context and users.
    pub demand: Option<Demand>,
    /// The resources of the system that the host tier needs.
    pub host: Option<HostNeeds>,
    /// The limits of the machine that the plan exceeds.
    pub limits: Vec<LimitHit>,
    /// Predicted times.
    pub predictions: Vec<Prediction>,
    /// Changes that reduce the host memory by at least 20 %.
    pub savings: Vec<Saving>,
    /// Hit ratios, if the request has a trace.
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
    /// The source of its parameters; `None` for the caller's file.
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
    /// Its descriptive name.
    pub title: String,
    /// The origin of its figures.
    pub sources: Vec<String>,
    /// The date of its description.
    pub date: String,
}

impl Plan {
    /// Creates a plan. This takes milliseconds, and reads only the request.
    ///
    /// # Errors
    ///
    /// [`PlanError`] in these cases:
    ///
    /// - The model's configuration is refused.
    /// - A number is out of range, or one of two dependent numbers is missing.
    /// - A tier is smaller than one block of every group, or larger than a layout can be.
    /// - A size does not fit in 64 bits.
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
            limits: limits::exceeded(request, &tiers, host.as_ref()),
            predictions: predictions::predict(request, &groups, &tiers, demand.as_ref())?,
            savings: advice::savings(request, &groups, &tiers, demand.as_ref())?,
            engines: engines::options(request, &geometry, &groups),
            groups,
            tiers,
            demand,
            host,
            trace,
        })
    }
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
