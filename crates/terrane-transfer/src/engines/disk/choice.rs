//! Which way bytes go that could go either way: whichever is faster here.
//!
//! Pieces that are aligned in file and memory need no copy on the way: one request takes them from
//! where they lie. But a device counts its work in segments, which are contiguous in physical
//! memory. A request has many of them where pieces are short or lie on small pages. Where segments
//! are dear, it is faster to copy into a buffer on huge pages first. No processor's or disk's name
//! tells whether they are; it is measured.

use std::time::Duration;

use terrane_core::{ByteCount, Capability, CapabilityReport, Grant};

use super::route::{Flow, Route, Selection};
use crate::engines::rate::Rate;
use crate::{Side, TransferPlan};

/// What each way has done lately.
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

    /// The way that `plan` should go, of those that its alignment allows: while one of them has
    /// not been measured, that one, and then the one that should take less time.
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

/// What the segments of requests are like, where memory is the other end of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segments {
    Long,
    ShortPieces,
    SmallPages,
}

impl Segments {
    /// Those of a plan, whose memory and file are at these sides. Pages that the memory does not
    /// report to be huge count as small.
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

/// Whether memory with this report is on huge pages, at least for the greater part.
fn are_huge(report: &CapabilityReport) -> bool {
    let kinds = [Capability::ExplicitHugePages, Capability::TransparentHugePages];
    kinds.iter().any(|kind| match report.grant(kind) {
        Some(Grant::Granted) => true,
        Some(Grant::Partial { granted, of }) => granted.get() >= of.get() / 2,
        _ => false,
    })
}
