//! The engines that copy into and out of the bounce slots, and the predicted time.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use terrane_core::{Durability, Location, StorageKind};

use super::bounce::BounceSlots;
use super::chunks::{Chunk, Chunking, rows_in_slot};
use super::engine_queues::EngineNumber;
use super::step::RelayStep;
use crate::checksums::Checksums;
use crate::engine::declined::Declined;
use crate::engine::order::DeviceOrder;
use crate::engine::quote::{Decision, Quote};
use crate::engine::{CopyEngine, quote};
use crate::error::TransferError;
use crate::hazard::endpoint::Endpoint;
use crate::plan::TransferPlan;
use crate::plan::planner::Planner;
use crate::side::{Ends, Side};
use crate::transfer::{Transfer, TransferOptions};

/// State shared by the engine and its thread.
#[derive(Debug)]
pub(super) struct RelayShared {
    pub(super) engines: [Arc<dyn CopyEngine>; 2],
    pub(super) bounce: BounceSlots,
    pub(super) planner: Planner,
}

/// The route of a plan through the relay.
#[derive(Clone, Debug)]
pub(super) struct RelayRoute {
    pub(super) chunking: Chunking,
    /// The numbers of the engines into and out of the slots, and their names.
    queues: [EngineNumber; 2],
    names: [&'static str; 2],
    quotes: [Quote; 2],
    bounce: StorageKind,
    /// The hop that uses the device of the stated order.
    order_hop: RelayStep,
    /// The hop that uses the peer to be notified.
    notification_hop: RelayStep,
    /// The hop that computes checksums, if they are requested.
    pub(super) checksum_hop: Option<RelayStep>,
}

impl RelayShared {
    /// The route of a plan.
    pub(super) fn route(
        &self,
        plan: &TransferPlan,
        options: &TransferOptions,
    ) -> Result<RelayRoute, Declined> {
        let bounce = self.bounce.kind();
        if [plan.source(), plan.destination()].iter().any(|end| end.kind() == bounce) {
            return Err(Declined::Kinds);
        }
        let chunking = Chunking::of(plan, options.layer_by_layer, self.bounce.slot_bytes())?;
        let slot =
            self.bounce.planning_endpoint(&chunking.slot).map_err(|_| Declined::SlotTooSmall)?;
        let sample = ChunkTransfers::of(&chunking, plan);
        let hops = [RelayStep::IntoBounce, RelayStep::OutOfBounce]
            .map(|step| self.planner.plan(&sample.of_hop(step, plan, &slot)));
        // The planner refuses only a layout that overlaps the slots' memory.
        let [Ok(into), Ok(out)] = hops else { return Err(Declined::Kinds) };
        let quotes = |into_slots: &dyn CopyEngine,
                      out_of_slots: &dyn CopyEngine,
                      checksum_hop: Option<RelayStep>| {
            let [mut first, mut second] = hop_options(plan, options, self);
            match checksum_hop {
                Some(RelayStep::IntoBounce) => first.checksums = Some(Checksums::Compute),
                Some(_) => second.checksums = Some(Checksums::Compute),
                None => {}
            }
            Ok([quote(into_slots, &into, &first)?, quote(out_of_slots, &out, &second)?])
        };
        let checksum_hops: &[Option<RelayStep>] = match options.checksums {
            Some(_) => &[Some(RelayStep::IntoBounce), Some(RelayStep::OutOfBounce)],
            None => &[None],
        };
        let [one, other] = &self.engines;
        let order_hop = order_hop(plan, options);
        let mut why = Declined::Kinds;
        // If both are one engine, its parts share queue 0.
        let second = usize::from(!Arc::ptr_eq(one, other));
        let hops = [([one, other], [0, second]), ([other, one], [second, 0])];
        let ways = hops.iter().flat_map(|hop| checksum_hops.iter().map(move |sums| (hop, *sums)));
        for (&([into_slots, out_of_slots], queues), checksum_hop) in ways {
            match quotes(&**into_slots, &**out_of_slots, checksum_hop) {
                Ok(quotes) => {
                    let names = [into_slots.name(), out_of_slots.name()];
                    let notification_hop = notification_hop_of(plan);
                    return Ok(RelayRoute {
                        chunking,
                        queues,
                        names,
                        quotes,
                        bounce,
                        order_hop,
                        notification_hop,
                        checksum_hop,
                    });
                }
                // Returns the more specific of two reasons.
                Err(Declined::Kinds) => {}
                Err(declined) => why = declined,
            }
        }
        Err(why)
    }

    /// The engine that executes a step.
    pub(super) fn engine(&self, route: &RelayRoute, step: RelayStep) -> &Arc<dyn CopyEngine> {
        &self.engines[route.engine_number(step)]
    }

    /// The plan of a step that copies nothing.
    pub(super) fn empty_plan(
        &self,
        route: &RelayRoute,
        plan: &TransferPlan,
        step: RelayStep,
    ) -> Result<TransferPlan, TransferError> {
        let slot = self.bounce.planning_endpoint(&route.chunking.slot)?;
        let nothing = ChunkTransfers { sources: &[], destinations: &[], chunk: None };
        self.planner.plan(&nothing.of_hop(route.hop(step), plan, &slot))
    }

    /// The options of a part on this hop, once the device order of its transfer is satisfied.
    pub(super) fn options(
        &self,
        hop: RelayStep,
        plan: &TransferPlan,
        options: &TransferOptions,
    ) -> TransferOptions {
        let end = match hop {
            RelayStep::OutOfBounce => plan.destination(),
            _ => plan.source(),
        };
        let on_device = end.kind().is_device() || self.bounce.kind().is_device();
        TransferOptions {
            device_order: on_device.then_some(DeviceOrder::AlreadySynchronised),
            durability: Durability::None,
            deadline: options.deadline,
            more_follows: true,
            layer_by_layer: false,
            notification: None,
            checksums: None,
        }
    }
}

impl RelayRoute {
    /// The hop that a step belongs to: into or out of a slot.
    pub(super) fn hop(&self, step: RelayStep) -> RelayStep {
        match step {
            RelayStep::Order => self.order_hop,
            RelayStep::Notification => self.notification_hop,
            RelayStep::Durability => RelayStep::OutOfBounce,
            hop => hop,
        }
    }

    /// The number of the engine that executes a step.
    pub(super) fn engine_number(&self, step: RelayStep) -> EngineNumber {
        let [into, out] = self.queues;
        if self.hop(step) == RelayStep::OutOfBounce { out } else { into }
    }

    /// The quote of the route.
    pub(super) fn into_quote(self) -> Quote {
        let [first, second] = &self.quotes;
        let predicted = pipelined(first.predicted, second.predicted, self.chunking.chunks());
        Quote::new(predicted, self)
    }
}

impl Decision for RelayRoute {
    fn path(&self) -> Cow<'_, str> {
        let ([into, out], [first, second]) = (self.names, &self.quotes);
        format!("{} by {into}, then {} by {out}", first.path(), second.path()).into()
    }

    fn label(&self) -> &'static str {
        "relayed"
    }

    fn reason(&self) -> Cow<'_, str> {
        let ([into, out], [first, second]) = (self.names, &self.quotes);
        format!(
            "through {} memory, in {} chunks of up to {}; {into}: {}; {out}: {}",
            self.bounce,
            self.chunking.chunks(),
            self.chunking.slot.total_bytes(),
            first.reason(),
            second.reason(),
        )
        .into()
    }
}

/// The time of both hops of the first chunk, and of the slower hop of each other chunk.
fn pipelined(first: Duration, second: Duration, chunks: usize) -> Duration {
    let further = u32::try_from(chunks.saturating_sub(1)).unwrap_or(u32::MAX);
    first.saturating_add(second).saturating_add(first.max(second).saturating_mul(further))
}

/// The hop that uses the device of a stated order.
fn order_hop(plan: &TransferPlan, options: &TransferOptions) -> RelayStep {
    let stated = options.device_order.as_ref().and_then(DeviceOrder::device);
    let takes_part = |end: &Endpoint| match end.kind() {
        StorageKind::Device(device) => stated.is_none_or(|stated| stated == device),
        _ => false,
    };
    if takes_part(plan.destination()) && !takes_part(plan.source()) {
        RelayStep::OutOfBounce
    } else {
        RelayStep::IntoBounce
    }
}

/// The hop that uses a peer.
fn notification_hop_of(plan: &TransferPlan) -> RelayStep {
    match plan.source().kind().is_remote() {
        true => RelayStep::IntoBounce,
        false => RelayStep::OutOfBounce,
    }
}

/// The options for the quotes of the hops, with a device order and a durability that the engines
/// accept.
fn hop_options(
    plan: &TransferPlan,
    options: &TransferOptions,
    shared: &RelayShared,
) -> [TransferOptions; 2] {
    let [mut first, mut second] = [RelayStep::IntoBounce, RelayStep::OutOfBounce]
        .map(|step| shared.options(step, plan, options));
    match order_hop(plan, options) {
        RelayStep::OutOfBounce => second.device_order.clone_from(&options.device_order),
        _ if options.device_order.is_some() => first.device_order.clone_from(&options.device_order),
        _ => {}
    }
    second.durability = options.durability;
    match notification_hop_of(plan) {
        RelayStep::IntoBounce => first.notification.clone_from(&options.notification),
        _ => second.notification.clone_from(&options.notification),
    }
    [first, second]
}

/// Whether the device order is not satisfied yet.
pub(super) fn has_order(options: &TransferOptions) -> bool {
    !matches!(options.device_order, None | Some(DeviceOrder::AlreadySynchronised))
}

/// Whether the plan writes anything that must be made durable.
pub(super) fn has_durability(plan: &TransferPlan, options: &TransferOptions) -> bool {
    let stated = plan.destination().bases().iter().filter_map(|base| match base {
        Location::File(position) => Some(position.file.durability),
        _ => None,
    });
    stated.map(|durability| durability.max(options.durability)).any(|it| it > Durability::None)
}

/// The transfers of one chunk.
pub(super) struct ChunkTransfers<'a> {
    pub(super) sources: &'a [u32],
    pub(super) destinations: &'a [u32],
    /// `None` for a chunk of no blocks.
    pub(super) chunk: Option<Chunk>,
}

impl<'a> ChunkTransfers<'a> {
    /// The first chunk of a plan.
    fn of(chunking: &Chunking, plan: &'a TransferPlan) -> Self {
        let chunk = chunking.chunk(0);
        let pairs = chunk.as_ref().map(|chunk| chunk.pairs.clone()).unwrap_or_default();
        Self {
            sources: plan.source_blocks().get(pairs.clone()).unwrap_or_default(),
            destinations: plan.destination_blocks().get(pairs).unwrap_or_default(),
            chunk,
        }
    }

    /// The transfer of a hop, into or out of a slot.
    pub(super) fn of_hop(&self, hop: RelayStep, plan: &TransferPlan, slot: &Endpoint) -> Transfer {
        let in_slot: Vec<u32> = (0..).take(self.sources.len()).collect();
        let (side, transfer) = match hop {
            RelayStep::OutOfBounce => (
                Side::Destination,
                Transfer::new(slot, plan.destination()).blocks(&in_slot, self.destinations),
            ),
            _ => (Side::Source, Transfer::new(plan.source(), slot).blocks(self.sources, &in_slot)),
        };
        let with_slot = |range: Range<u32>| match (rows_in_slot(&range), side) {
            (rows, Side::Source) => Ends { source: range, destination: rows },
            (rows, Side::Destination) => Ends { source: rows, destination: range },
        };
        let heads = (!plan.has_all_heads()).then(|| with_slot(plan.heads(side)));
        let tokens = plan.tokens(side).map(with_slot);
        self.layered(Transfer { heads, tokens, ..transfer }, side)
    }

    /// In a slot, layer 0 is the first layer of the chunk.
    fn layered(&self, transfer: Transfer, side: Side) -> Transfer {
        let (layers, destination_first_layer) = match &self.chunk {
            Some(chunk) => (chunk.layers.clone(), chunk.destination_first_layer),
            None => (0..1, 0),
        };
        let (layers, destination_first_layer) = match side {
            Side::Source => (layers, 0),
            Side::Destination => (0..layers.end - layers.start, destination_first_layer),
        };
        let counts = [&transfer.source, &transfer.destination]
            .map(|end| end.layout().geometry().num_layers());
        if layers == (0..counts[0]) && destination_first_layer == 0 && counts[0] == counts[1] {
            // All layers, as layouts with sections without layers require.
            return transfer;
        }
        Transfer {
            layers: Some(layers),
            destination_first_layer: Some(destination_first_layer),
            ..transfer
        }
    }
}
