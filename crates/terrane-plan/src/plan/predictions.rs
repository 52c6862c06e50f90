//! Predicted times, with the origin of each rate.

use serde::{Deserialize, Serialize};

use crate::machine::{CopyCost, Rates};
use crate::plan::groups::{Demand, GroupPlan, context_bytes};
use crate::plan::memory::{TierKind, TierPlan};
use crate::request::PlanRequest;

/// A predicted time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// The operation.
    pub what: String,
    /// The bytes, on one rank.
    pub bytes: u64,
    /// The time in seconds. Without measured rates, a copy takes at least this long.
    pub seconds: f64,
    /// Whether the rates were measured.
    pub is_measured: bool,
    /// The name of the calibration, or of the published figures.
    pub rates: String,
}

/// The times of preparing memory, and of copies between the tiers.
pub(crate) fn predict(
    request: &PlanRequest,
    groups: &[GroupPlan],
    tiers: &[TierPlan],
    demand: Option<&Demand>,
) -> Vec<Prediction> {
    let Some(rates) = request.machine.as_ref().and_then(|machine| machine.rates.as_ref()) else {
        return Vec::new();
    };
    let mut predictions = Vec::new();
    let find = |kind| tiers.iter().find(|tier| tier.kind == kind);
    let prediction = |what: String, bytes: u64, seconds: f64| Prediction {
        what,
        bytes,
        seconds,
        is_measured: rates.is_measured,
        rates: rates.name.clone(),
    };
    if let Some(host) = find(TierKind::Host) {
        let preparations = [
            ("first touch of the host tier", rates.first_touch),
            ("bring-up of the pinned host tier", rates.pinned_bring_up),
        ];
        for (what, cost) in preparations {
            let seconds = cost.map(|cost| cost.seconds(host.used_bytes));
            predictions
                .extend(seconds.map(|seconds| prediction(what.into(), host.used_bytes, seconds)));
        }
    }
    for (from, to, cost) in routes(
        rates,
        find(TierKind::Device).is_some(),
        find(TierKind::Host).is_some(),
        find(TierKind::Disk).is_some(),
    ) {
        for (what, bytes) in units(request, groups, demand) {
            predictions.push(prediction(
                format!("{what}, {from} to {to}"),
                bytes,
                cost.seconds(bytes),
            ));
        }
    }
    predictions
}

/// The copies between tiers of the plan whose rates are known.
fn routes(
    rates: &Rates,
    device: bool,
    host: bool,
    disk: bool,
) -> Vec<(&'static str, &'static str, CopyCost)> {
    let routes = [
        (device && host, "device", "host", rates.to_host),
        (device && host, "host", "device", rates.to_device),
        (host && disk, "host", "disk", rates.disk_write),
        (host && disk, "disk", "host", rates.disk_read),
    ];
    let known = routes.into_iter().filter(|(exists, ..)| *exists);
    known.filter_map(|(_, from, to, cost)| Some((from, to, cost?))).collect()
}

/// A block, a chunk, and a context if the request has one. Groups of states are part of a context only.
fn units(
    request: &PlanRequest,
    groups: &[GroupPlan],
    demand: Option<&Demand>,
) -> Vec<(&'static str, u64)> {
    let with_tokens = || groups.iter().filter(|group| !group.is_state);
    let block: u64 = with_tokens().map(|group| group.block_bytes).sum();
    let chunk: u64 = with_tokens().map(|group| group.chunk_bytes).sum();
    let context =
        demand.and_then(|demand| context_bytes(groups, demand.context, request.block_tokens).ok());
    let mut units = vec![("a block", block), ("a chunk", chunk)];
    units.extend(context.map(|bytes| ("a context", bytes.get())));
    units.retain(|&(_, bytes)| bytes > 0);
    units
}
