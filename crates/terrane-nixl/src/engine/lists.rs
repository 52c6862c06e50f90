//! Builds the descriptors of a request from a plan's runs.

use std::ops::Range;

use terrane_core::{Alignment, ByteCount};
use terrane_layout::RegionOffset;
use terrane_transfer::{Side, TransferPlan};

use super::error::RequestFailed;
use super::numbering::Numbering;
use super::route::Route;
use crate::agent::Backend;
use crate::{FileAccess, NixlEngineOptions, Status};

/// A place within the runs of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) run: usize,
    /// Bytes from the start of the run.
    pub(super) offset: u64,
}

/// The part of a plan that one request copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// The first place, and the one after the last.
    pub(super) places: Range<Place>,
    pub(super) bytes: ByteCount,
}

/// The limits of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Most {
    bytes: u64,
    descriptors: usize,
}

impl Most {
    /// The limits of the options; whole pages where the backend bypasses the page cache.
    pub(super) fn of(options: &NixlEngineOptions, backend: Option<&Backend>) -> Self {
        let direct = backend.is_some_and(|backend| backend.file_access == FileAccess::Direct);
        let unit = if direct { Alignment::PAGE.get() } else { 1 };
        let wanted = (options.request_descriptors.get(), options.request_bytes.get());
        let ios = backend.and_then(|backend| backend.ios.as_ref());
        let (descriptors, bytes) = ios.map_or(wanted, |ios| ios.within(wanted.0, wanted.1));
        let bytes = (bytes - bytes % unit).max(unit);
        Self { bytes, descriptors }
    }

    /// The stretch that begins at `from`; `None` at the end of the plan. In a layer-by-layer plan it
    /// ends with its layer.
    pub(super) fn stretch(
        self,
        plan: &TransferPlan,
        from: Place,
        layer_by_layer: bool,
    ) -> Option<Stretch> {
        let runs = plan.runs();
        if from.run >= runs.len() {
            return None;
        }
        let layer = plan.layer(from.run);
        // In most cases everything fits, and the runs need not be counted one by one.
        let fits = runs.len() <= self.descriptors && plan.bytes().get() <= self.bytes;
        if fits && from == Place::default() && !layer_by_layer {
            let end = Place { run: runs.len(), offset: 0 };
            return Some(Stretch { places: from..end, bytes: plan.bytes() });
        }
        let (mut at, mut bytes, mut descriptors) = (from, 0, 0);
        while let Some(run) = runs.get(at.run)
            && descriptors < self.descriptors
            && bytes < self.bytes
            && (!layer_by_layer || plan.layer(at.run) == layer)
        {
            let left = run.bytes().get() - at.offset;
            let taken = left.min(self.bytes - bytes);
            bytes += taken;
            descriptors += 1;
            at = if taken == left {
                Place { run: at.run + 1, offset: 0 }
            } else {
                Place { offset: at.offset + taken, ..at }
            };
        }
        Some(Stretch { places: from..at, bytes: ByteCount::new(bytes) })
    }
}

impl Stretch {
    /// The number of descriptors that it takes.
    pub(super) fn descriptors(&self) -> usize {
        let Range { start, end } = &self.places;
        end.run.saturating_sub(start.run) + usize::from(end.offset > 0)
    }

    /// The runs that it overlaps: their indices, and the offset and length of each part.
    fn parts<'a>(
        &'a self,
        plan: &'a TransferPlan,
    ) -> impl Iterator<Item = (&'a terrane_transfer::CopyRun, u64, u64)> {
        let Range { start, end } = self.places.clone();
        let last = end.run + usize::from(end.offset > 0);
        let runs = plan.runs().get(start.run..last).unwrap_or_default();
        (start.run..).zip(runs).map(move |(number, run)| {
            let from = if number == start.run { start.offset } else { 0 };
            let to = if number == end.run { end.offset } else { run.bytes().get() };
            (run, from, to - from)
        })
    }

    /// Whether it consists of whole pieces at both ends, with at most two for each descriptor.
    /// Naming pieces by index is work for each piece, so listing joined runs is then cheaper.
    pub(super) fn is_of_pieces(&self, plan: &TransferPlan) -> bool {
        let ends = [plan.source(), plan.destination()].map(|end| end.layout().geometry().pieces());
        let [Some(source), Some(destination)] = ends else { return false };
        let piece = source.piece_bytes().get();
        let is_whole = |bytes: u64| bytes.checked_rem(piece) == Some(0);
        let descriptors = ByteCount::from_usize(self.descriptors()).get();
        !plan.breaks_pieces()
            && source.piece_bytes() == destination.piece_bytes()
            && [self.places.start.offset, self.bytes.get()].into_iter().all(is_whole)
            && self.bytes.get() / piece <= descriptors.saturating_mul(2)
    }

    /// The indices of its pieces at one end. `None` if it does not consist of whole pieces.
    pub(super) fn numbers(
        &self,
        plan: &TransferPlan,
        side: Side,
        numbering: &Numbering,
        numbers: &mut Vec<i32>,
    ) -> Option<()> {
        numbers.clear();
        let piece = numbering.piece().get();
        for (run, from, length) in self.parts(plan) {
            let at = run.at(side);
            let mut left = length;
            while left > 0 {
                let offset = at.offset + from + (length - left);
                numbers.push(numbering.number(RegionOffset { offset, ..at })?);
                left = left.checked_sub(piece)?;
            }
        }
        Some(())
    }

    /// The two lists of descriptors: of local memory and of the target.
    pub(super) fn lists(
        &self,
        plan: &TransferPlan,
        route: &Route,
    ) -> Result<[nixl_sys::XferDescList<'static>; 2], Refused> {
        let [local, target] = &route.ends;
        let list = |memory: crate::MemoryType| {
            nixl_sys::XferDescList::new(memory.into_raw())
                .map_err(|error| Refused::Status(Status::of(&error)))
        };
        let (mut here, mut there) = (list(local.memory)?, list(target.memory)?);
        for (run, from, length) in self.parts(plan) {
            let place = |end: &super::end::End, side: Side| {
                let at = run.at(side);
                let base = end.base(route.backend, at.region)?;
                let address = base.address.checked_add(at.offset)?.checked_add(from)?;
                Some((ByteCount::new(address).to_usize(), base.device))
            };
            let no_address = Refused::Failed(RequestFailed::NoAddress);
            let (Some((near, device)), Some((far, far_device))) =
                (place(local, route.local), place(target, route.target_side()))
            else {
                return Err(no_address);
            };
            let length = ByteCount::new(length).to_usize();
            here.add_desc(near, length, device);
            there.add_desc(far, length, far_device);
        }
        Ok([here, there])
    }
}

/// Why there are no lists.
#[derive(Debug)]
pub(super) enum Refused {
    Status(Status),
    Failed(RequestFailed),
}
