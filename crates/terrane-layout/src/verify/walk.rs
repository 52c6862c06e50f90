//! Tracks how pieces fill the regions.

use terrane_core::{AddressSpace, ByteCount, Position};

use super::findings::{Extent, PieceIndex, VerifyReport, Violation};
use crate::geometry::Geometry;

/// The regions in the order of memory, and the filled part of each.
pub(super) struct Walk {
    regions: Vec<Filled>,
    largest_padding: u64,
    /// The region of the previous piece, which usually contains the next one.
    latest: usize,
    pieces: u64,
    padding: u64,
    hole: Option<Violation>,
}

struct Filled {
    number: u32,
    space: AddressSpace,
    start: u64,
    length: u64,
    /// Bytes up to the end of the last piece.
    filled: u64,
    last: Option<PieceIndex>,
}

impl Walk {
    pub(super) fn new(geometry: &Geometry, extents: &[Extent]) -> Result<Self, Violation> {
        // Checked first, so that no sum of gaps overflows.
        extents
            .iter()
            .try_fold(ByteCount::ZERO, |sum, extent| sum.checked_add(extent.length))
            .map_err(|_| Violation::RegionsTooLong)?;
        let mut regions: Vec<Filled> = (0_u32..)
            .zip(extents)
            .map(|(number, extent)| Filled {
                number,
                space: extent.place.space,
                start: extent.place.start,
                length: extent.length.get(),
                filled: 0,
                last: None,
            })
            .collect();
        regions.sort_unstable_by_key(|region| (region.space, region.start, region.length));
        // Among regions with bytes, each must begin after the end of the previous one.
        let mut with_bytes = regions.iter().filter(|region| region.length > 0);
        let mut previous = with_bytes.next();
        for next in with_bytes {
            if let Some(previous) = previous
                && previous.space == next.space
                && next.start - previous.start < previous.length
            {
                let (a, b) = (previous.number, next.number);
                return Err(Violation::RegionsOverlap { first: a.min(b), second: a.max(b) });
            }
            previous = Some(next);
        }
        Ok(Self {
            regions,
            // Free strides may leave gaps of any length.
            largest_padding: match geometry.origin() {
                Some((config, _)) => {
                    config.block_alignment().max(geometry.block_alignment()).get() - 1
                }
                None => u64::MAX,
            },
            latest: 0,
            pieces: 0,
            padding: 0,
            hole: None,
        })
    }

    /// The index of the region that contains a piece, in the order of memory.
    pub(super) fn find(
        &mut self,
        piece: PieceIndex,
        place: Position,
        length: u64,
    ) -> Result<usize, Violation> {
        let contains = |region: &Filled| {
            region.space == place.space
                && region.start <= place.start
                && place.start - region.start < region.length
        };
        if !self.regions.get(self.latest).is_some_and(contains) {
            let after = self.regions.partition_point(|region| {
                (region.space, region.start) <= (place.space, place.start)
            });
            self.latest = after.checked_sub(1).ok_or(Violation::OutOfBounds { piece, place })?;
        }
        let fits = |region: &&Filled| {
            contains(region) && region.length - (place.start - region.start) >= length
        };
        match self.regions.get(self.latest).filter(fits) {
            Some(_) => Ok(self.latest),
            None => Err(Violation::OutOfBounds { piece, place }),
        }
    }

    /// Adds a piece that `find` has located in `region`, after all earlier pieces of this region.
    ///
    /// An overlap is an error at once. A hole is reported at the end, because a later piece may
    /// fill it.
    pub(super) fn step(
        &mut self,
        region: usize,
        piece: PieceIndex,
        start: u64,
        length: u64,
    ) -> Result<(), Violation> {
        let Some(region) = self.regions.get_mut(region) else {
            return Ok(());
        };
        let offset = start - region.start;
        let Some(gap) = offset.checked_sub(region.filled) else {
            return Err(Violation::Overlap { first: region.last.unwrap_or(piece), second: piece });
        };
        if gap > self.largest_padding && self.hole.is_none() {
            self.hole = Some(Violation::Hole {
                region: region.number,
                next: piece,
                bytes: ByteCount::new(gap),
                largest_padding: ByteCount::new(self.largest_padding),
            });
        }
        // `find` checked that the piece ends within its region, so these sums stay below its
        // length.
        region.filled = offset + length;
        region.last = Some(piece);
        self.padding += gap;
        self.pieces += 1;
        Ok(())
    }

    pub(super) fn finish(self) -> Result<VerifyReport, Violation> {
        if let Some(hole) = self.hole {
            return Err(hole);
        }
        let tail = self.regions.iter().map(|region| region.length - region.filled).sum();
        Ok(VerifyReport {
            pieces: self.pieces,
            padding: ByteCount::new(self.padding),
            tail: ByteCount::new(tail),
        })
    }
}
