//! Which way pieces go that are short and could go either way: whichever is faster here.
//!
//! Pieces that are aligned in file and memory need no copy on the way: one request takes them from
//! where they lie. But a device counts its work in segments, and of short pieces a request has many:
//! where each is dear, copying them into one buffer first is faster. Whether it is, no processor's
//! or disk's name tells; it is measured.

use std::time::Duration;

use terrane_core::ByteCount;

use super::route::{Flow, Route, Selection};
use crate::TransferPlan;
use crate::engines::rate::Rate;

/// What each way has done lately.
#[derive(Debug)]
pub(super) struct Rates {
    read: Ways,
    write: Ways,
    between_files: Rate,
}

#[derive(Debug)]
struct Ways {
    vectored: Rate,
    staged: Rate,
}

/// From this mean length on, pieces are large enough not to matter by their number.
const LONG_RUN: ByteCount = ByteCount::kib(128);

/// With fewer pieces a request there is nothing to gain from joining them.
const MANY_PIECES: u64 = 4;

/// Transfers of less are no measure of a disk, and go the way that costs no copy.
const LEAST_CHOSEN: ByteCount = ByteCount::mib(16);

impl Rates {
    /// Guesses, until transfers have been measured: a disk of the slower sort.
    pub(super) fn new() -> Self {
        let guess = |rate| Rate::new(rate, Duration::from_micros(100), Duration::from_nanos(100));
        let ways = || Ways { vectored: guess(1e9), staged: guess(1e9) };
        Self { read: ways(), write: ways(), between_files: guess(5e8) }
    }

    pub(super) fn of(&self, route: &Route) -> &Rate {
        let ways = match route.flow {
            Flow::Read => &self.read,
            Flow::Write => &self.write,
            Flow::BetweenFiles => return &self.between_files,
        };
        if route.staged { &ways.staged } else { &ways.vectored }
    }

    /// The way that `plan` should go, of those that its alignment allows: while one of them has
    /// not been measured, that one, and then the one that should take less time.
    pub(super) fn choose(&self, route: Route, plan: &TransferPlan) -> Route {
        let mean = plan.mean_run();
        let file = plan.end(route.file_side()).layout().geometry();
        let pieces = file.contiguous_unit_bytes().get().checked_div(mean.get()).unwrap_or(0);
        let are_short = mean < LONG_RUN && pieces >= MANY_PIECES;
        if !route.could_be_staged() || !are_short || plan.bytes() < LEAST_CHOSEN {
            return route;
        }
        let ways = [false, true].map(|staged| route.selected(staged, Selection::ToBeMeasured));
        if let Some(unknown) = ways.iter().find(|way| !self.of(way).is_known()) {
            return *unknown;
        }
        let [vectored, staged] =
            ways.map(|way| self.of(&way).predict(plan.bytes(), plan.run_count()));
        route.selected(staged < vectored, Selection::Faster)
    }
}
