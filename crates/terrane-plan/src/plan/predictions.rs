//! Predicted times, with the origin of each rate.

use serde::{Deserialize, Serialize};
use terrane_core::ByteCount;

use crate::error::PlanError;
use crate::machine::{CopyCost, Rates};
use crate::plan::groups::{Demand, GroupPlan, context_bytes};
use crate::plan::memory::{TierKind, TierPlan};
use crate::request::PlanRequest;

/// A predicted time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prediction {
    /// The operation. It ends with `, all ranks` if several ranks share memory or a disk for it.
    pub what: String,
    /// The bytes of one rank, or of all ranks that share memory or a disk.
    pub bytes: u64,
    /// The time in seconds. Without measured rates, a copy takes at least this long.
    pub seconds: f64,
    /// Whether the rates were measured.
    pub is_measured: bool,
    /// The name of the calibration, or of the published figures.
    pub rates: String,
}

/// The times of preparing memory, and of copies between the tiers. All ranks share the processors,
/// the memory and the disks of the machine, and do the same at the same time. Each has its own link
/// to its device.
pub(crate) fn predict(
    request: &PlanRequest,
    groups: &[GroupPlan],
    tiers: &[TierPlan],
    demand: Option<&Demand>,
) -> Result<Vec<Prediction>, PlanError> {
    let Some(rates) = request.machine.as_ref().and_then(|machine| machine.rates.as_ref()) else {
        return Ok(Vec::new());
    };
    let ranks = u64::from(request.tensor_parallel);
    let of_all = |what: String, bytes: u64| -> Result<(String, u64), PlanError> {
        let what = if ranks > 1 { format!("{what}, all ranks") } else { what };
        Ok((what, ByteCount::new(bytes).checked_mul("ranks", ranks)?.get()))
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
            let (what, bytes) = of_all(what.to_owned(), host.used_bytes)?;
            let seconds = cost.map(|cost| cost.seconds(bytes));
            predictions.extend(seconds.map(|seconds| prediction(what, bytes, seconds)));
        }
    }
    for (from, to, cost) in routes(
        rates,
        find(TierKind::Device).is_some(),
        find(TierKind::Host).is_some(),
        find(TierKind::Disk).is_some(),
    ) {
        for (what, bytes) in units(request, groups, demand) {
            let what = format!("{what}, {from} to {to}");
            let is_shared = [from, to].contains(&"disk");
            let (what, bytes) = if is_shared { of_all(what, bytes)? } else { (what, bytes) };
            predictions.push(prediction(what, bytes, cost.seconds(bytes)));
        }
    }
    Ok(predictions)
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

/// A block, a chunk, and a context if the request has one. Groups of states are part of a context
/// only.
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
