//! Divides a plan's runs into requests, and lists their descriptors.

use std::ops::Range;

use terrane_core::convert::to_u64;
use terrane_core::{Alignment, ByteCount};
use terrane_layout::RegionOffset;
use terrane_transfer::{Side, TransferPlan};

use super::piece_index::PieceIndex;
use super::region_bases::RegionBases;
use crate::agent::backend::Backend;
use crate::agent::config::FileAccess;
use crate::bindings::memory_type::MemoryType;
use crate::bindings::status::Status;
use crate::engine::error::RequestError;
use crate::engine::local_and_target::LocalAndTarget;
use crate::engine::options::NixlEngineOptions;
use crate::engine::route::Route;

/// A position within the runs of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::engine) struct PlanPosition {
    pub(in crate::engine) run: usize,
    /// Bytes from the start of the run.
    pub(in crate::engine) offset: u64,
}

/// The part of a plan that one request copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Chunk {
    /// The first position, and the position after the last byte.
    pub(in crate::engine) positions: Range<PlanPosition>,
    pub(in crate::engine) bytes: ByteCount,
}

/// The limits of a request.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct RequestLimits {
    bytes: u64,
    descriptors: usize,
}

impl RequestLimits {
    /// The limits of the options; whole pages if the backend uses direct I/O.
    pub(in crate::engine) fn of(options: &NixlEngineOptions, backend: Option<&Backend>) -> Self {
        let direct = backend.is_some_and(|backend| backend.file_access == FileAccess::Direct);
        let unit = if direct { Alignment::PAGE.get() } else { 1 };
        let wanted = (options.request_descriptors.get(), options.request_bytes.get());
        let ios = backend.and_then(|backend| backend.ios.as_ref());
        let (descriptors, bytes) = ios.map_or(wanted, |ios| ios.request_limits(wanted.0, wanted.1));
        let bytes = (bytes - bytes % unit).max(unit);
        Self { bytes, descriptors }
    }

    /// The chunk that begins at `from`; `None` at the end of the plan. In a layer-by-layer plan it
    /// ends with its layer.
    pub(in crate::engine) fn chunk(
        self,
        plan: &TransferPlan,
        from: PlanPosition,
        layer_by_layer: bool,
    ) -> Option<Chunk> {
        let runs = plan.runs();
        if from.run >= runs.len() {
            return None;
        }
        let layer = plan.layer(from.run);
        // In most cases everything fits, and the runs need not be counted one by one.
        let fits = runs.len() <= self.descriptors && plan.bytes().get() <= self.bytes;
        if fits && from == PlanPosition::default() && !layer_by_layer {
            let end = PlanPosition { run: runs.len(), offset: 0 };
            return Some(Chunk { positions: from..end, bytes: plan.bytes() });
        }
        let (mut at, mut bytes, mut descriptors) = (from, 0, 0);
        while let Some(run) = runs.get(at.run)
            && descriptors < self.descriptors
            && bytes < self.bytes
            && (!layer_by_layer || plan.layer(at.run) == layer)
        {
            let remaining = run.bytes().get() - at.offset;
            let length_taken = remaining.min(self.bytes - bytes);
            bytes += length_taken;
            descriptors += 1;
            at = if length_taken == remaining {
                PlanPosition { run: at.run + 1, offset: 0 }
            } else {
                PlanPosition { offset: at.offset + length_taken, ..at }
            };
        }
        Some(Chunk { positions: from..at, bytes: ByteCount::new(bytes) })
    }
}

impl Chunk {
    /// The number of its descriptors.
    pub(in crate::engine) fn descriptors(&self) -> usize {
        let Range { start, end } = &self.positions;
        end.run.saturating_sub(start.run) + usize::from(end.offset > 0)
    }

    /// The runs that it overlaps, each with the offset and length of the overlap.
    fn parts<'a>(
        &'a self,
        plan: &'a TransferPlan,
    ) -> impl Iterator<Item = (&'a terrane_transfer::CopyRun, u64, u64)> {
        let Range { start, end } = self.positions.clone();
        let last = end.run + usize::from(end.offset > 0);
        let runs = plan.runs().get(start.run..last).unwrap_or_default();
        (start.run..).zip(runs).map(move |(number, run)| {
            let from = if number == start.run { start.offset } else { 0 };
            let to = if number == end.run { end.offset } else { run.bytes().get() };
            (run, from, to - from)
        })
    }

    /// Whether the chunk consists of whole pieces at both ends, with at most two pieces per
    /// descriptor. With more, listing joined runs is cheaper than an index for each piece.
    pub(in crate::engine) fn is_of_pieces(&self, plan: &TransferPlan) -> bool {
        let ends = [plan.source(), plan.destination()].map(|end| end.layout().geometry().pieces());
        let [Some(source), Some(destination)] = ends else { return false };
        let piece = source.piece_bytes().get();
        let is_whole = |bytes: u64| bytes.checked_rem(piece) == Some(0);
        let descriptors = to_u64(self.descriptors());
        !plan.breaks_pieces()
            && source.piece_bytes() == destination.piece_bytes()
            && [self.positions.start.offset, self.bytes.get()].into_iter().all(is_whole)
            && self.bytes.get() / piece <= descriptors.saturating_mul(2)
    }

    /// Writes the indices of its pieces at one end to `indices`. `None` if it does not consist of
    /// whole pieces.
    pub(in crate::engine) fn piece_indices(
        &self,
        plan: &TransferPlan,
        side: Side,
        index: &PieceIndex,
        indices: &mut Vec<i32>,
    ) -> Option<()> {
        indices.clear();
        let piece = index.piece_bytes.get();
        for (run, from, length) in self.parts(plan) {
            let at = run.at(side);
            let mut remaining = length;
            while remaining > 0 {
                let offset = at.offset + from + (length - remaining);
                indices.push(index.index_of(RegionOffset { offset, ..at })?);
                remaining = remaining.checked_sub(piece)?;
            }
        }
        Some(())
    }

    /// Lists its descriptors.
    pub(in crate::engine) fn descriptor_lists(
        &self,
        plan: &TransferPlan,
        route: &Route,
    ) -> Result<LocalAndTarget<nixl_sys::XferDescList<'static>>, ListError> {
        let LocalAndTarget { local, target } = &route.bases;
        let list = |memory: MemoryType| {
            nixl_sys::XferDescList::new(memory.into_raw())
                .map_err(|error| ListError::Status(Status::of(&error)))
        };
        let mut lists = LocalAndTarget { local: list(local.memory)?, target: list(target.memory)? };
        for (run, from, length) in self.parts(plan) {
            let descriptor = |bases: &RegionBases, side: Side| {
                let at = run.at(side);
                let base = bases.base(route.backend, at.region)?;
                let address = base.address.checked_add(at.offset)?.checked_add(from)?;
                Some((ByteCount::new(address).to_usize(), base.device))
            };
            let (Some((local_address, local_device)), Some((target_address, target_device))) =
                (descriptor(local, route.local), descriptor(target, route.target_side()))
            else {
                return Err(ListError::Failed(RequestError::NoAddress));
            };
            let length = ByteCount::new(length).to_usize();
            lists.local.add_desc(local_address, length, local_device);
            lists.target.add_desc(target_address, length, target_device);
        }
        Ok(lists)
    }
}

/// The reason why descriptors could not be listed.
#[derive(Debug)]
pub(in crate::engine) enum ListError {
    /// NIXL refused the list.
    Status(Status),
    Failed(RequestError),
}
