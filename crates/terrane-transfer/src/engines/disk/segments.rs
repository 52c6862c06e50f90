//! The segments that determine a device's cost of a request.

use terrane_core::{ByteCount, Capability, CapabilityReport, CapabilityStatus};

use crate::plan::TransferPlan;
use crate::side::Side;

/// The mean length from which the number of pieces does not matter.
const LONG_RUN: ByteCount = ByteCount::kib(128);

/// With fewer pieces per request, joining them gains nothing.
const MANY_PIECES: u64 = 4;

/// Smaller transfers do not measure a disk. They are copied without a buffer.
pub(super) const MIN_CHOSEN: ByteCount = ByteCount::mib(16);

/// The segments of requests between memory and a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Segments {
    Long,
    ShortPieces,
    SmallPages,
}

impl Segments {
    /// The segments of a plan, with its memory and its file at these ends. Pages count as small
    /// unless the memory reports huge pages.
    pub(super) fn of(plan: &TransferPlan, memory: Side, file: Side) -> Self {
        let mean = plan.mean_run();
        let geometry = plan.end(file).layout().geometry();
        let unit = match (geometry.page(), geometry.pieces()) {
            (Some(page), _) => page.bytes(),
            (None, Some(pieces)) => pieces.piece_bytes().get(),
            (None, None) => 0,
        };
        let pieces = unit.checked_div(mean.get()).unwrap_or(0);
        if plan.bytes() >= MIN_CHOSEN && !are_huge(&plan.end(memory).layout().capabilities()) {
            Self::SmallPages
        } else if mean < LONG_RUN && pieces >= MANY_PIECES {
            Self::ShortPieces
        } else {
            Self::Long
        }
    }
}

terrane_core::display_names!(Segments {
    Self::Long => "pieces are long",
    Self::ShortPieces => "pieces are short",
    Self::SmallPages => "the memory's pages are small",
});

/// Whether most of the memory with this report is on huge pages.
fn are_huge(report: &CapabilityReport) -> bool {
    let kinds = [Capability::ExplicitHugePages, Capability::TransparentHugePages];
    kinds.iter().any(|kind| match report.status(kind) {
        Some(CapabilityStatus::Granted) => true,
        Some(CapabilityStatus::Partial { granted, of }) => granted.get() >= of.get() / 2,
        _ => false,
    })
}
