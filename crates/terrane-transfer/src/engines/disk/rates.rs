//! The choice of the faster path, if bytes can be copied directly or through a buffer.
//!
//! Pieces that are aligned in the file and in memory need no bounce buffer: one request reads or
//! writes them in place. But the cost of a request depends on its segments, which are contiguous in
//! physical memory. Short pieces and small pages mean many segments. If segments are expensive, it
//! is faster to copy into a buffer on huge pages first. This depends on the processor and the disk,
//! so the engine measures it.

use std::array::from_fn;
use std::time::Duration;

use terrane_core::ByteCount;
use terrane_storage::IoMemory;

use super::route::{DiskRoute, FileFlow, Selection};
use super::segments::{MIN_CHOSEN, Segments};
use crate::engine::rate::Rate;
use crate::hazard::endpoint::Endpoint;
use crate::plan::TransferPlan;

/// The recent rates of each path.
#[derive(Debug)]
pub(super) struct DiskRates {
    /// By the segments and the registration of the memory, by the direction, and by whether the
    /// path is staged. Long segments cost little, so their registration does not count.
    paths: [[[Rate; 2]; 2]; 5],
    between_files: Rate,
}

impl DiskRates {
    /// Estimates of a slow disk, until transfers have been measured.
    pub(super) fn new() -> Self {
        let guess = |rate| Rate::new(rate, Duration::from_micros(100), Duration::from_nanos(100));
        let directions = |_| from_fn(|_| from_fn(|_| guess(1e9)));
        Self { paths: from_fn(directions), between_files: guess(5e8) }
    }

    pub(super) fn of(&self, route: &DiskRoute) -> &Rate {
        let registered = usize::from(route.registered);
        let memory = match route.segments {
            Segments::Long => 0,
            Segments::ShortPieces => 1 + registered,
            Segments::SmallPages => 3 + registered,
        };
        let direction = match route.flow {
            FileFlow::Read => 0,
            FileFlow::Write => 1,
            FileFlow::BetweenFiles => return &self.between_files,
        };
        &self.paths[memory][direction][usize::from(route.staged)]
    }

    /// The path for `plan`, among those that its alignment permits. A path that has not been
    /// measured is chosen first. After that, the path with the shorter predicted time.
    pub(super) fn choose(&self, mut route: DiskRoute, plan: &TransferPlan) -> DiskRoute {
        if !route.could_be_staged() || route.segments == Segments::Long || plan.bytes() < MIN_CHOSEN
        {
            return route;
        }
        route.registered = route.memory_side().is_some_and(|side| is_registered(plan.end(side)));
        let ways = [false, true].map(|staged| route.selected(staged, Selection::ToBeMeasured));
        if let Some(unknown) = ways.iter().find(|way| !self.of(way).is_known()) {
            return *unknown;
        }
        let [vectored, staged] =
            ways.map(|way| self.of(&way).predict(plan.bytes(), plan.run_count()));
        route.selected(staged < vectored, Selection::Faster)
    }
}

/// Whether at least half of an endpoint's memory is registered.
fn is_registered(end: &Endpoint) -> bool {
    let sum = |bytes: fn(&IoMemory) -> ByteCount| -> u64 {
        end.io_memory().iter().map(|memory| bytes(memory).get()).sum()
    };
    let registered = sum(IoMemory::registered);
    registered > 0 && registered >= sum(IoMemory::length) / 2
}
