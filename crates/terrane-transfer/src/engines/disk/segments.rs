//! The segments that a device counts its work in.

use std::fmt;

use terrane_core::{ByteCount, Capability, CapabilityReport, CapabilityStatus};

use crate::plan::TransferPlan;
use crate::side::Side;

/// From this mean length on, the number of pieces does not matter.
const LONG_RUN: ByteCount = ByteCount::kib(128);

/// With fewer pieces a request, joining them gains nothing.
const MANY_PIECES: u64 = 4;

/// Smaller transfers do not measure a disk, and take the path without a copy.
pub(super) const LEAST_CHOSEN: ByteCount = ByteCount::mib(16);

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

impl fmt::Display for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Long => "pieces are long",
            Self::ShortPieces => "pieces are short",
            Self::SmallPages => "the memory's pages are small",
        })
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
