//! Chooses the faster path where bytes can go directly or through a buffer.
//!
//! Pieces that are aligned in file and memory need no bounce buffer: one request reads or writes
//! them in place. But a device counts its work in segments, which are contiguous in physical
//! memory. A request has many of them where pieces are short or lie on small pages. Where segments
//! are expensive, it is faster to copy into a buffer on huge pages first. The name of a processor
//! or disk does not tell whether they are, so the engine measures it.

use std::time::Duration;

use terrane_core::{ByteCount, Capability, CapabilityReport, CapabilityStatus};

use super::route::{Flow, Route, Selection};
use crate::engines::rate::Rate;
use crate::{Side, TransferPlan};

/// The recent rates of each path.
#[derive(Debug)]
pub(super) struct Rates {
    /// Where every segment is long.
    long: Directions,
    /// Where pieces are short, on huge pages.
    short_pieces: Directions,
    /// Where pages are small, whatever the pieces.
    small_pages: Directions,
    between_files: Rate,
}

#[derive(Debug)]
struct Directions {
    read: Ways,
    write: Ways,
}

#[derive(Debug)]
struct Ways {
    vectored: Rate,
    staged: Rate,
}

/// From this mean length on, the number of pieces does not matter.
const LONG_RUN: ByteCount = ByteCount::kib(128);

/// With fewer pieces a request, joining them gains nothing.
const MANY_PIECES: u64 = 4;

/// Smaller transfers do not measure a disk, and take the path without a copy.
const LEAST_CHOSEN: ByteCount = ByteCount::mib(16);

impl Rates {
    /// Guesses, until transfers have been measured: those of a slow disk.
    pub(super) fn new() -> Self {
        let guess = |rate| Rate::new(rate, Duration::from_micros(100), Duration::from_nanos(100));
        let ways = || Ways { vectored: guess(1e9), staged: guess(1e9) };
        let directions = || Directions { read: ways(), write: ways() };
        Self {
            long: directions(),
            short_pieces: directions(),
            small_pages: directions(),
            between_files: guess(5e8),
        }
    }

    pub(super) fn of(&self, route: &Route) -> &Rate {
        let directions = match route.segments {
            Segments::Long => &self.long,
            Segments::ShortPieces => &self.short_pieces,
            Segments::SmallPages => &self.small_pages,
        };
        let ways = match route.flow {
            Flow::Read => &directions.read,
            Flow::Write => &directions.write,
            Flow::BetweenFiles => return &self.between_files,
        };
        if route.staged { &ways.staged } else { &ways.vectored }
    }

    /// The path for `plan`, of those that its alignment allows. A path that has not been measured
    /// comes first; after that, the path with the shorter predicted time.
    pub(super) fn choose(&self, route: Route, plan: &TransferPlan) -> Route {
        if !route.could_be_staged()
            || route.segments == Segments::Long
            || plan.bytes() < LEAST_CHOSEN
        {
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

/// The segments of requests between memory and a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segments {
    Long,
    ShortPieces,
    SmallPages,
}

impl Segments {
    /// The segments of a plan whose memory and file are at these sides. Pages count as small unless
    /// the memory reports huge ones.
    pub(super) fn of(plan: &TransferPlan, memory: Side, file: Side) -> Self {
        let mean = plan.mean_run();
        let geometry = plan.end(file).layout().geometry();
        let unit = match (geometry.page(), geometry.pieces()) {
            (Some(page), _) => page.bytes(),
            (None, Some(pieces)) => pieces.piece_bytes().get(),
            (None, None) => 0,
        };
        let pieces = unit.checked_div(mean.get()).unwrap_or(0);
        if plan.bytes() >= LEAST_CHOSEN && !are_huge(&plan.end(memory).layout().capabilities()) {
            Self::SmallPages
        } else if mean < LONG_RUN && pieces >= MANY_PIECES {
            Self::ShortPieces
        } else {
            Self::Long
        }
    }
}

/// Whether most of the memory with this report is on huge pages.
fn are_huge(report: &CapabilityReport) -> bool {
    let kinds = [Capability::ExplicitHugePages, Capability::TransparentHugePages];
    kinds.iter().any(|kind| match report.status(kind) {
        Some(CapabilityStatus::Granted) => true,
        Some(CapabilityStatus::Partial { granted, of }) => granted.get() >= of.get() / 2,
        _ => false,
    })
}
