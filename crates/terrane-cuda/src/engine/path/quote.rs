//! A transfer's properties for this engine, and its cost by each path.

use std::borrow::Cow;
use std::sync::Arc;

use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, CapabilityReport, StorageKind};
use terrane_transfer::calibration::{CopyPath, Direction};
use terrane_transfer::{
    CopyGrid, Decision, Declined, DeviceOrder, Quote, Side, TransferOptions, TransferPlan,
};

use crate::engine::DeviceEngine;
use crate::engine::checksums::job_sums::{shape_of, summed_side};
use crate::engine::checksums::limits::SumLimits;
use crate::engine::geometry::packing::{
    Packing, PackingOrder, packing_for, runs_are_blocks, staged_side,
};
use crate::engine::path::choice::{Choice, ChoiceReason, Shape};
use crate::engine::resources::device_mapping::DeviceMapping;
use crate::kernels::transpose::copies_by_tiles;

/// How the engine copies a plan.
#[derive(Clone, Debug)]
pub(crate) struct PathDecision {
    pub(crate) direction: Direction,
    pub(crate) path: CopyPath,
    /// The packing of the staged path, if that path serves the plan.
    pub(crate) packing: Option<Packing>,
    reason: ChoiceReason,
    /// The status of the kernels, if the engine has none.
    no_kernels: Option<Arc<CapabilityReport>>,
    /// Whether a kernel computes checksums.
    sums: bool,
}

impl Decision for PathDecision {
    fn path(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.path.name())
    }

    fn label(&self) -> &'static str {
        self.path.name()
    }

    fn reason(&self) -> Cow<'_, str> {
        // Both devices can copy, so the explanation names the one that does.
        let device = match self.direction {
            Direction::ToPeer => "; the source's device writes",
            Direction::FromPeer => "; the destination's device reads",
            _ => "",
        };
        let sums = if self.sums { "; a kernel computes the checksums" } else { "" };
        let reason = &self.reason;
        Cow::Owned(match &self.no_kernels {
            Some(report) => format!("{reason}{device}{sums}; {report}"),
            None => format!("{reason}{device}{sums}"),
        })
    }
}

impl DeviceEngine {
    /// The direction of a plan's copy relative to this device, if a device engine copies it.
    pub(crate) fn direction(&self, plan: &TransferPlan) -> Option<Direction> {
        use StorageKind::{Device, Pinned};
        let own = self.shared.context.device().id;
        match (plan.source().kind(), plan.destination().kind()) {
            (Pinned, Device(to)) if to == own => Some(Direction::ToDevice),
            (Device(from), Pinned) if from == own => Some(Direction::ToHost),
            (Device(from), Device(to)) => match (from == own, to == own) {
                (true, true) => Some(Direction::WithinDevice),
                (true, false) => Some(Direction::ToPeer),
                (false, true) => Some(Direction::FromPeer),
                (false, false) => None,
            },
            _ => None,
        }
    }

    /// The quote for a plan, by the forced path or by the chosen one.
    ///
    /// # Errors
    ///
    /// The reason why the engine does not serve it.
    pub(crate) fn quote_by(
        &self,
        plan: &TransferPlan,
        options: &TransferOptions,
        forced: Option<CopyPath>,
    ) -> Result<Quote, Declined> {
        let direction = self.direction(plan).ok_or(Declined::Kinds)?;
        // A lock that another thread held at a fork stays locked in the child.
        self.shared.context.driver().check_process().map_err(|_| Declined::Kinds)?;
        if let Some(device) = options.device_order.as_ref().and_then(DeviceOrder::device) {
            let is_end = |side| plan.end(side).kind() == StorageKind::Device(device);
            if !is_end(Side::Source) && !is_end(Side::Destination) {
                return Err(Declined::DeviceOrder);
            }
        }
        // If a driver query fails, the transfer is not served.
        let ends = self.shared.mapping.ends(plan).ok().flatten().ok_or(Declined::Kinds)?;
        let sides = [Side::Source, Side::Destination];
        if !ends.iter().zip(sides).all(|(end, side)| end.covers(plan, side)) {
            return Err(Declined::MemoryNotReady);
        }
        if options.checksums.is_some() {
            self.check_sums(plan, direction)?;
        }
        let grids = plan.grids().map_or(&[][..], |grids| grids);
        let packing = self.packing(plan, grids, direction, options);
        let shape = self.shape(plan, grids, direction, &ends, packing.as_ref());
        let Choice { path, predicted, reason } = shape
            .choose(&self.shared.calibration, &self.shared.corrections, forced)
            .ok_or(Declined::Kinds)?;
        let no_kernels =
            self.shared.kernels.is_none().then(|| Arc::clone(&self.shared.capabilities));
        let sums = options.checksums.is_some();
        let predicted = if sums {
            let by_chunks = completes_in_order(grids, path, packing.as_ref());
            let limits = SumLimits::of(&self.shared, direction);
            let added = limits.added(direction, plan.bytes().get(), by_chunks, predicted);
            predicted.saturating_add(added)
        } else {
            predicted
        };
        let decision = PathDecision { direction, path, packing, reason, no_kernels, sums };
        Ok(Quote::new(predicted, decision))
    }

    /// Checks that kernels compute the checksums of a plan.
    ///
    /// # Errors
    ///
    /// The reason why they do not.
    #[cold]
    fn check_sums(&self, plan: &TransferPlan, direction: Direction) -> Result<(), Declined> {
        let kernels = self.shared.kernels.as_ref().ok_or(Declined::ChecksumKernels)?;
        shape_of(plan, summed_side(direction)).ok_or(Declined::ChecksumLayout)?;
        kernels.prepare_sums().map_err(|error| {
            tracing::debug!(%error, "no kernels for checksums");
            Declined::ChecksumKernels
        })
    }

    /// The packing of a plan on the staged path; `None` if that path does not serve it.
    fn packing(
        &self,
        plan: &TransferPlan,
        grids: &[CopyGrid],
        direction: Direction,
        options: &TransferOptions,
    ) -> Option<Packing> {
        let with_host = matches!(direction, Direction::ToDevice | Direction::ToHost);
        if !with_host || self.shared.kernels.is_none() {
            return None;
        }
        let packing = packing_for(plan, grids, staged_side(direction), options.layer_by_layer)?;
        (packing.of_layer() <= self.shared.options.scratch_bytes.get()).then_some(packing)
    }

    /// The properties of a plan that determine its cost.
    fn shape(
        &self,
        plan: &TransferPlan,
        grids: &[CopyGrid],
        direction: Direction,
        ends: &[Arc<DeviceMapping>; 2],
        packing: Option<&Packing>,
    ) -> Shape {
        let has_kernels = self.shared.kernels.is_some();
        let side = staged_side(direction);
        let blocks = plan.blocks(side);
        let pairs = to_u64(plan.destination_blocks().len());
        let cells_of = |grid: &CopyGrid| {
            // Within the device, these cells of a piece cost no more than one cell with as many bytes.
            let is_one = direction == Direction::WithinDevice
                && (grid.bytes >= SECTOR || copies_by_tiles(grid));
            let [rows, columns] = if is_one { [1, 1] } else { [grid.rows, grid.columns] };
            let factors = [grid.layers, grid.outers, rows, columns];
            factors.iter().fold(pairs, |cells, &count| cells.saturating_mul(count.into()))
        };
        let cells = grids.iter().map(cells_of).fold(0, u64::saturating_add);
        Shape {
            direction,
            bytes: plan.bytes().get(),
            runs: plan.run_count(),
            cells,
            stretches: packing.map(|packing| packing.count_stretches(blocks, side)),
            kernels: has_kernels && !grids.is_empty() && ends.iter().all(|end| end.has_kernels()),
            batches: self.shared.has_batches,
        }
    }
}

/// The smallest cell that a kernel within the device copies at the rate of long cells: a sector of
/// the device's cache. An H100 re-laid out 2 GiB in cells of 32 to 256 bytes at 0.83 to 0.97 of the
/// rate of a contiguous copy. In cells of 16 bytes it reached 0.26 to 0.93.
const SECTOR: ByteCount = ByteCount::new(32);

/// Whether the chunks of a path complete blocks one after the other.
fn completes_in_order(grids: &[CopyGrid], path: CopyPath, packing: Option<&Packing>) -> bool {
    match path {
        CopyPath::Staged => packing.is_some_and(|packing| packing.order == PackingOrder::Blocks),
        CopyPath::Contiguous | CopyPath::CopyEach | CopyPath::Batched => runs_are_blocks(grids),
        CopyPath::Direct | CopyPath::Relayout | CopyPath::Peer => false,
    }
}
