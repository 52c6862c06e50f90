//! Two layouts of the same bytes: exactly the transfers that would read and write the same bytes
//! are refused.

use std::ops::Range;

use proptest::prelude::*;
use terrane_core::{Allocate, ByteCount, Region, RegionRequest};
use terrane_layout::{LayoutBuilder, LayoutKind};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::model::place;
use terrane_transfer::{Endpoint, Planner, Transfer, TransferError};

use crate::support::*;

/// A layout of 4 blocks whose regions begin `shift` bytes into `base`.
fn shifted(base: &Region, kind: LayoutKind, shift: u64) -> Endpoint {
    let config = config(4);
    let geometry = terrane_layout::Geometry::new(&config, kind).unwrap();
    let length = geometry.region_bytes(0);
    let regions = (0..u64::from(geometry.region_count())).map(|region| {
        let offset = ByteCount::new(shift + region * length.get());
        base.view(offset, length).unwrap()
    });
    let builder = LayoutBuilder::new(config).kind(kind).adopt(regions);
    // SAFETY: no two transfers are in flight at the same time in these tests.
    unsafe { Endpoint::sharing(builder.unregistered().build().unwrap()) }
}

/// The byte ranges of a block's pieces in the base.
fn bytes_of(kind: LayoutKind, shift: u64, block: u32) -> Vec<Range<u64>> {
    let config = config(4);
    let region_bytes = terrane_layout::Geometry::new(&config, kind).unwrap().region_bytes(0).get();
    let pieces = (0..8).map(|piece| [block, piece / 2, piece % 2]);
    let begins = pieces.map(|piece| {
        let (region, bytes) = place(&config, kind, piece);
        shift + u64::try_from(region).unwrap() * region_bytes + u64::try_from(bytes.start).unwrap()
    });
    begins.map(|begin| begin..begin + PIECE).collect()
}

proptest! {
    #[test]
    fn an_overlap_is_found_if_and_only_if_there_is_one(
        kinds in [0..3_usize, 0..3_usize],
        shift in prop_oneof![0..2000_u64, (0..32_u64).prop_map(|pieces| pieces * PIECE)],
        from in 0..4_u32,
        to in 0..4_u32,
    ) {
        let [source, destination] = kinds.map(|kind| LayoutKind::ALL[kind]);
        let bytes = ByteCount::new(2 * config(4).total_bytes().get() + 2000);
        let base = Region::new(HeapAllocator::system().allocate(&RegionRequest::new(bytes)).unwrap());
        let ends = [shifted(&base, source, 0), shifted(&base, destination, shift)];
        let transfer = Transfer::new(&ends[0], &ends[1]).blocks(&[from], &[to]);
        let read = bytes_of(source, 0, from);
        let written = bytes_of(destination, shift, to);
        let overlap =
            read.iter().any(|r| written.iter().any(|w| r.start < w.end && w.start < r.end));
        match Planner::new().plan(&transfer) {
            Ok(_) => prop_assert!(!overlap, "not found"),
            Err(TransferError::Overlap { source_block, destination }) => {
                prop_assert!(overlap, "found where there is none");
                prop_assert_eq!((source_block, destination), (from, to));
            }
            Err(other) => prop_assert!(false, "{}", other),
        }
    }
}
