//! The choice of the faster path, if bytes can be copied directly or through a buffer.
//!
//! Pieces that are aligned in the file and in memory need no bounce buffer: one request reads or
//! writes them in place. But the cost of a request depends on its segments, which are contiguous in
//! physical memory. Short pieces and small pages mean many segments. If segments are expensive, it
//! is faster to copy into a buffer on huge pages first. This depends on the processor and the disk,
//! so the engine measures it.

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
    /// If every segment is long.
    long: DirectionRates,
    /// If pieces are short, on huge pages: of memory that is not registered, and that is.
    short_pieces: [DirectionRates; 2],
    /// If pages are small: of memory that is not registered, and that is.
    small_pages: [DirectionRates; 2],
    between_files: Rate,
}

#[derive(Debug)]
struct DirectionRates {
    read: PathRates,
    write: PathRates,
}

#[derive(Debug)]
struct PathRates {
    vectored: Rate,
    staged: Rate,
}

impl DiskRates {
    /// Estimates of a slow disk, until transfers have been measured.
    pub(super) fn new() -> Self {
        let guess = |rate| Rate::new(rate, Duration::from_micros(100), Duration::from_nanos(100));
        let ways = || PathRates { vectored: guess(1e9), staged: guess(1e9) };
        let directions = || DirectionRates { read: ways(), write: ways() };
        Self {
            long: directions(),
            short_pieces: [directions(), directions()],
            small_pages: [directions(), directions()],
            between_files: guess(5e8),
        }
    }

    pub(super) fn of(&self, route: &DiskRoute) -> &Rate {
        let directions = match route.segments {
            Segments::Long => &self.long,
            Segments::ShortPieces => of_memory(&self.short_pieces, route),
            Segments::SmallPages => of_memory(&self.small_pages, route),
        };
        let ways = match route.flow {
            FileFlow::Read => &directions.read,
            FileFlow::Write => &directions.write,
            FileFlow::BetweenFiles => return &self.between_files,
        };
        if route.staged { &ways.staged } else { &ways.vectored }
    }

    /// The path for `plan`, among those that its alignment permits. A path that has not been
    /// measured is chosen first. After that, the path with the shorter predicted time.
    pub(super) fn choose(&self, route: DiskRoute, plan: &TransferPlan) -> DiskRoute {
        if !route.could_be_staged() || route.segments == Segments::Long || plan.bytes() < MIN_CHOSEN
        {
            return route;
        }
        let registered = route.memory_side().is_some_and(|side| is_registered(plan.end(side)));
        let route = route.in_registered(registered);
        let ways = [false, true].map(|staged| route.selected(staged, Selection::ToBeMeasured));
        if let Some(unknown) = ways.iter().find(|way| !self.of(way).is_known()) {
            return *unknown;
        }
        let [vectored, staged] =
            ways.map(|way| self.of(&way).predict(plan.bytes(), plan.run_count()));
        route.selected(staged < vectored, Selection::Faster)
    }
}

const fn of_memory<'a>(
    [other, registered]: &'a [DirectionRates; 2],
    route: &DiskRoute,
) -> &'a DirectionRates {
    if route.registered { registered } else { other }
}

/// Whether at least half of an endpoint's memory is registered.
fn is_registered(end: &Endpoint) -> bool {
    let sum = |bytes: fn(&IoMemory) -> ByteCount| -> u64 {
        end.io_memory().iter().map(|memory| bytes(memory).get()).sum()
    };
    let registered = sum(IoMemory::registered);
    registered > 0 && registered >= sum(IoMemory::length) / 2
}
