//! The engines that copy into and out of the bounce slots, and the predicted time.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use terrane_core::{Durability, Location, StorageKind};

use super::bounce::Bounce;
use super::cut::{Chunk, Cut, rows_in_slot};
use super::lanes::LaneNumber;
use super::step::RelayStep;
use crate::{
    CopyEngine, Decision, Declined, DeviceOrder, Endpoint, Planner, Quote, Side, Terms, Transfer,
    TransferError, TransferPlan,
};

/// State shared by the engine and its thread.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) engines: [Arc<dyn CopyEngine>; 2],
    pub(super) bounce: Bounce,
    pub(super) planner: Planner,
}

/// The route of a plan through the relay.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) cut: Cut,
    /// The numbers of the engines into and out of the slots, and their names.
    lanes: [LaneNumber; 2],
    names: [&'static str; 2],
    quotes: [Quote; 2],
    bounce: StorageKind,
    /// The hop that the device of the stated order takes part in.
    order_step: RelayStep,
    /// The hop that the peer to notify takes part in.
    tells_by: RelayStep,
}

impl Shared {
    /// The route of a plan.
    pub(super) fn route(&self, plan: &TransferPlan, terms: &Terms) -> Result<Route, Declined> {
        let bounce = self.bounce.kind();
        if [plan.source(), plan.destination()].iter().any(|end| end.kind() == bounce) {
            return Err(Declined::Kinds);
        }
        let cut = Cut::of(plan, terms.layer_wise, self.bounce.slot_bytes())?;
        let slot = self.bounce.to_plan_by(&cut.slot).map_err(|_| Declined::SlotTooSmall)?;
        let sample = Sample::of(&cut, plan);
        let hops = [
            self.planner.plan(&sample.inwards(plan, &slot)),
            self.planner.plan(&sample.outwards(&slot, plan)),
        ];
        // The planner refuses only a layout that overlaps the slots'.
        let [Ok(into), Ok(out)] = hops else { return Err(Declined::Kinds) };
        let quotes = |into_slots: &dyn CopyEngine, out_of_slots: &dyn CopyEngine| {
            let [first, second] = quoted_terms(plan, terms, self);
            Ok([into_slots.quote(&into, &first)?, out_of_slots.quote(&out, &second)?])
        };
        let [one, other] = &self.engines;
        let order_step = order_step(plan, terms);
        let mut why = Declined::Kinds;
        // Both may be the same engine.
        let second = usize::from(!Arc::ptr_eq(one, other));
        for ([into_slots, out_of_slots], lanes) in
            [([one, other], [0, second]), ([other, one], [second, 0])]
        {
            match quotes(&**into_slots, &**out_of_slots) {
                Ok(quotes) => {
                    let names = [into_slots.name(), out_of_slots.name()];
                    let tells_by = telling_step(plan);
                    return Ok(Route { cut, lanes, names, quotes, bounce, order_step, tells_by });
                }
                // Returns the more specific of two reasons.
                Err(Declined::Kinds) => {}
                Err(declined) => why = declined,
            }
        }
        Err(why)
    }

    /// The engine that executes a step.
    pub(super) fn engine(&self, route: &Route, step: RelayStep) -> &Arc<dyn CopyEngine> {
        let [one, other] = &self.engines;
        if route.lane(step) == 0 { one } else { other }
    }

    /// The plan of a job that copies nothing, and completes when the device order has been reached.
    pub(super) fn order_plan(
        &self,
        route: &Route,
        plan: &TransferPlan,
    ) -> Result<TransferPlan, TransferError> {
        let slot = self.bounce.to_plan_by(&route.cut.slot)?;
        let nothing = Sample::nothing();
        self.planner.plan(&match route.order_step {
            RelayStep::OutOfBounce => nothing.outwards(&slot, plan),
            _ => nothing.inwards(plan, &slot),
        })
    }

    /// The plan of a job that copies nothing, and completes when the destination is durable.
    pub(super) fn durability_plan(
        &self,
        route: &Route,
        plan: &TransferPlan,
    ) -> Result<TransferPlan, TransferError> {
        let slot = self.bounce.to_plan_by(&route.cut.slot)?;
        self.planner.plan(&Sample::nothing().outwards(&slot, plan))
    }

    /// The plan of a job that copies nothing, and notifies the peer.
    pub(super) fn notification_plan(
        &self,
        route: &Route,
        plan: &TransferPlan,
    ) -> Result<TransferPlan, TransferError> {
        let slot = self.bounce.to_plan_by(&route.cut.slot)?;
        let nothing = Sample::nothing();
        self.planner.plan(&match telling_step(plan) {
            RelayStep::IntoBounce => nothing.inwards(plan, &slot),
            _ => nothing.outwards(&slot, plan),
        })
    }

    /// The terms of a part of a transfer whose device order has been reached.
    pub(super) fn terms(&self, step: RelayStep, plan: &TransferPlan, terms: &Terms) -> Terms {
        let end = match step {
            RelayStep::Order | RelayStep::IntoBounce => plan.source(),
            RelayStep::OutOfBounce | RelayStep::Durability => plan.destination(),
            RelayStep::Notification => match telling_step(plan) {
                RelayStep::IntoBounce => plan.source(),
                _ => plan.destination(),
            },
        };
        let on_device = end.kind().is_device() || self.bounce.kind().is_device();
        Terms {
            device_order: on_device.then_some(DeviceOrder::AlreadySynchronised),
            durability: Durability::None,
            deadline: terms.deadline,
            more_follows: true,
            layer_wise: false,
            notification: None,
        }
    }
}

impl Route {
    /// The number of the engine that executes a step.
    pub(super) fn lane(&self, step: RelayStep) -> LaneNumber {
        let [into, out] = self.lanes;
        let hop = match step {
            RelayStep::Order => self.order_step,
            RelayStep::Notification => self.tells_by,
            RelayStep::Durability => RelayStep::OutOfBounce,
            hop => hop,
        };
        if hop == RelayStep::OutOfBounce { out } else { into }
    }

    /// The quote of the route.
    pub(super) fn into_quote(self) -> Quote {
        let [first, second] = &self.quotes;
        let predicted = pipelined(first.predicted, second.predicted, self.cut.chunks());
        Quote::new(predicted, self)
    }
}

impl Decision for Route {
    fn path(&self) -> Cow<'_, str> {
        let ([into, out], [first, second]) = (self.names, &self.quotes);
        format!("{} by {into}, then {} by {out}", first.path(), second.path()).into()
    }

    fn reason(&self) -> Cow<'_, str> {
        let ([into, out], [first, second]) = (self.names, &self.quotes);
        format!(
            "by way of {} memory, in {} chunks of up to {}; {into}: {}; {out}: {}",
            self.bounce,
            self.cut.chunks(),
            self.cut.slot.total_bytes(),
            first.reason(),
            second.reason(),
        )
        .into()
    }
}

/// The time of both hops of the first chunk, and of the slower hop of every further one.
fn pipelined(first: Duration, second: Duration, chunks: usize) -> Duration {
    let further = u32::try_from(chunks.saturating_sub(1)).unwrap_or(u32::MAX);
    first.saturating_add(second).saturating_add(first.max(second).saturating_mul(further))
}

/// The hop that the device of a stated order takes part in.
fn order_step(plan: &TransferPlan, terms: &Terms) -> RelayStep {
    let stated = terms.device_order.as_ref().and_then(DeviceOrder::device);
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

/// The hop that a peer takes part in.
fn telling_step(plan: &TransferPlan) -> RelayStep {
    match plan.source().kind().is_remote() {
        true => RelayStep::IntoBounce,
        false => RelayStep::OutOfBounce,
    }
}

/// The terms for the quotes of the hops. They state a device order and a durability that the
/// engines accept.
fn quoted_terms(plan: &TransferPlan, terms: &Terms, shared: &Shared) -> [Terms; 2] {
    let [mut first, mut second] =
        [RelayStep::IntoBounce, RelayStep::OutOfBounce].map(|step| shared.terms(step, plan, terms));
    match order_step(plan, terms) {
        RelayStep::OutOfBounce => second.device_order.clone_from(&terms.device_order),
        _ if terms.device_order.is_some() => first.device_order.clone_from(&terms.device_order),
        _ => {}
    }
    second.durability = terms.durability;
    match telling_step(plan) {
        RelayStep::IntoBounce => first.notification.clone_from(&terms.notification),
        _ => second.notification.clone_from(&terms.notification),
    }
    [first, second]
}

/// Whether the device order has yet to be reached.
pub(super) fn has_order(terms: &Terms) -> bool {
    !matches!(terms.device_order, None | Some(DeviceOrder::AlreadySynchronised))
}

/// Whether anything that the plan writes has to be made durable.
pub(super) fn has_durability(plan: &TransferPlan, terms: &Terms) -> bool {
    let stated = plan.destination().bases().iter().filter_map(|base| match base {
        Location::File(position) => Some(position.file.durability),
        _ => None,
    });
    stated.map(|durability| durability.max(terms.durability)).any(|it| it > Durability::None)
}

/// The transfers of one chunk.
pub(super) struct Sample<'a> {
    pub(super) sources: &'a [u32],
    pub(super) destinations: &'a [u32],
    /// `None` for a chunk of no blocks.
    pub(super) chunk: Option<Chunk>,
}

impl<'a> Sample<'a> {
    /// The first chunk of a plan.
    fn of(cut: &Cut, plan: &'a TransferPlan) -> Self {
        let chunk = cut.chunk(0);
        let pairs = chunk.as_ref().map(|chunk| chunk.pairs.clone()).unwrap_or_default();
        Self {
            sources: plan.source_blocks().get(pairs.clone()).unwrap_or_default(),
            destinations: plan.destination_blocks().get(pairs).unwrap_or_default(),
            chunk,
        }
    }

    fn nothing() -> Self {
        Self { sources: &[], destinations: &[], chunk: None }
    }

    /// From the plan's source into a slot.
    pub(super) fn inwards(&self, plan: &TransferPlan, slot: &Endpoint) -> Transfer {
        let transfer = Transfer::new(plan.source(), slot).blocks(self.sources, &self.in_slot());
        let heads = (!plan.has_all_heads()).then(|| plan.heads(Side::Source));
        let (heads, tokens) = (rows_in_slot(heads), rows_in_slot(plan.tokens(Side::Source)));
        self.layered(Transfer { heads, tokens, ..transfer }, Side::Source)
    }

    /// Out of a slot to the plan's destination.
    pub(super) fn outwards(&self, slot: &Endpoint, plan: &TransferPlan) -> Transfer {
        let transfer =
            Transfer::new(slot, plan.destination()).blocks(&self.in_slot(), self.destinations);
        let heads = (!plan.has_all_heads()).then(|| plan.heads(Side::Destination));
        let swapped = |[end, in_slot]: [Range<u32>; 2]| [in_slot, end];
        let heads = rows_in_slot(heads).map(swapped);
        let tokens = rows_in_slot(plan.tokens(Side::Destination)).map(swapped);
        self.layered(Transfer { heads, tokens, ..transfer }, Side::Destination)
    }

    /// The blocks of the slot, in the order of the chunk.
    fn in_slot(&self) -> Vec<u32> {
        (0..).take(self.sources.len()).collect()
    }

    /// In a slot, layer 0 is the first layer of the chunk.
    fn layered(&self, transfer: Transfer, side: Side) -> Transfer {
        let (layers, landing) = match &self.chunk {
            Some(chunk) => (chunk.layers.clone(), chunk.landing),
            None => (0..1, 0),
        };
        let (layers, landing) = match side {
            Side::Source => (layers, 0),
            Side::Destination => (0..layers.end - layers.start, landing),
        };
        let counts = [&transfer.source, &transfer.destination]
            .map(|end| end.layout().geometry().num_layers());
        if layers == (0..counts[0]) && landing == 0 && counts[0] == counts[1] {
            // All layers: layouts with sections that have no layers need that.
            return transfer;
        }
        Transfer { layers: Some(layers), landing: Some(landing), ..transfer }
    }
}
