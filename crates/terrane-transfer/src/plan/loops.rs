//! The loops that copy one pair of blocks, computed once for two endpoints.

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use terrane_core::ByteCount;

use super::grid::Grids;
use super::nest::{self, LayerGroup, LoopNest};
use super::shape::{self, Selection, SharedSection};
use crate::engine::endpoint_cache::EndpointCache;
use crate::error::TransferError;
use crate::transfer::Transfer;

/// The copies for each pair of blocks, independent of their ids.
#[derive(Debug)]
pub(crate) struct BlockLoops {
    pub(crate) selection: Selection,
    pub(crate) groups: SmallVec<[LayerGroup; 1]>,
    /// Whether runs are ordered block by block. Otherwise they are ordered layer by layer.
    pub(crate) by_block: bool,
    /// Whether parts of pieces are copied one by one.
    pub(crate) breaks_pieces: bool,
    /// The pieces of a block.
    pub(crate) pieces: u64,
    /// The copied bytes of a block.
    pub(crate) bytes: ByteCount,
    /// The runs of a segment, unless sections are joined.
    pub(super) runs: u64,
    /// Whether blocks that are adjacent at both ends are one run.
    pub(super) joins_blocks: bool,
    /// Whether the two ends are different endpoints that have some of the same bytes.
    pub(super) ends_overlap: bool,
    /// The grids, once they are requested.
    pub(super) grids: OnceLock<Option<Grids>>,
}

impl BlockLoops {
    /// Checks that both ends have blocks of equal shape, and finds the loops.
    fn of(transfer: &Transfer) -> Result<Self, TransferError> {
        let (selection, sections) = shape::check(transfer)?;
        let ends = [&transfer.source, &transfer.destination].map(|end| end.layout().geometry());
        // An end with contiguous blocks is accessed in sequence if runs are ordered block by block.
        let by_block =
            !transfer.options.layer_by_layer && ends.iter().any(|end| end.page().is_some());
        let groups = nest::layer_groups(&sections, &selection, by_block);
        let layers = u64::from(shape::count_of(&selection.layers.source));
        let (mut pieces, mut bytes) = (0, ByteCount::ZERO);
        for section in &sections {
            let count = if section.has_layers() { layers } else { 1 };
            pieces += count;
            let piece = ByteCount::new(section.piece_bytes(&selection));
            bytes = bytes.checked_add(piece.checked_mul("layers", count)?)?;
        }
        let breaks_pieces =
            groups.iter().flat_map(|group| &group.nests).any(|nest| !nest.inner.is_empty())
                || is_partial(&selection, &sections);
        let (source, destination) = (&transfer.source, &transfer.destination);
        Ok(Self {
            runs: nest::per_segment(&groups, LoopNest::inner_count),
            joins_blocks: groups.iter().flat_map(|group| &group.nests).all(LoopNest::joins_blocks),
            ends_overlap: !source.is(destination) && source.overlaps(destination),
            selection,
            groups,
            by_block,
            breaks_pieces,
            pieces,
            bytes,
            grids: OnceLock::new(),
        })
    }
}

/// Whether only some rows of pieces are copied. Pieces then count as broken up, even if one run
/// remains of each.
fn is_partial(selection: &Selection, sections: &[SharedSection<'_>]) -> bool {
    let copies_all = |section: &SharedSection<'_>| {
        let bytes = section.piece_bytes(selection);
        section.ends.into_iter().all(|end| end.shape().piece_bytes() == bytes)
    };
    let has_all_rows = selection.has_all_heads && selection.tokens.is_none();
    !has_all_rows && !sections.iter().all(copies_all)
}

/// The loops of whole blocks between pairs of endpoints.
#[derive(Debug, Default)]
pub(super) struct LoopsCache {
    by_block: EndpointCache<Arc<BlockLoops>, 2>,
    by_layer: EndpointCache<Arc<BlockLoops>, 2>,
}

impl LoopsCache {
    /// Returns the loops of a transfer. Transfers of some layers, heads or tokens are not cached.
    pub(super) fn get(&self, transfer: &Transfer) -> Result<Arc<BlockLoops>, TransferError> {
        let Transfer { source, destination, options, .. } = transfer;
        if !transfer.copies_whole_blocks() {
            return BlockLoops::of(transfer).map(Arc::new);
        }
        let known = if options.layer_by_layer { &self.by_layer } else { &self.by_block };
        match known.get_together([source, destination]) {
            Some(loops) => Ok(loops),
            None => {
                let loops = Arc::new(BlockLoops::of(transfer)?);
                Ok(known.insert_together([source, destination], loops))
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
    use terrane_testkit::memory::HeapAllocator;

    use super::*;
    use crate::engine::endpoint_cache::MIN_SWEPT;
    use crate::hazard::endpoint::Endpoint;

    #[expect(clippy::unwrap_used, reason = "tests say what they expect by unwrapping it")]
    fn endpoint() -> Endpoint {
        let config = LayoutConfig::builder().num_blocks(2).num_layers(3).outer_dim(1);
        let config = config.page_size(1).inner_dim(1).element(ElementFormat::Width(2));
        let layout = LayoutBuilder::new(config.build().unwrap()).fully_contiguous();
        Endpoint::new(layout.allocate(&HeapAllocator::system()).unregistered().build().unwrap())
            .unwrap()
    }

    #[expect(clippy::unwrap_used, reason = "tests say what they expect by unwrapping it")]
    fn loops(cache: &LoopsCache, transfer: &Transfer) -> Arc<BlockLoops> {
        cache.get(transfer).unwrap()
    }

    #[test]
    fn whole_blocks_between_two_endpoints_have_the_same_loops_each_time() {
        let (cache, one, other) = (LoopsCache::default(), endpoint(), endpoint());
        let transfer = Transfer::new(&one, &other);
        let first = loops(&cache, &transfer.clone().blocks(&[0], &[1]));
        assert!(Arc::ptr_eq(&first, &loops(&cache, &transfer.clone().blocks(&[1], &[0]))));
        for different in [
            Transfer::new(&other, &one),
            transfer.clone().layer_by_layer(),
            transfer.clone().layers(0..3),
            transfer.clone().tokens(0..1, 0..1),
            transfer.heads(0..1, 0..1),
        ] {
            let found = cache.get(&different);
            assert!(found.is_err() || !Arc::ptr_eq(&first, &found.unwrap()), "{different:?}");
        }
    }

    #[test]
    fn loops_of_dropped_endpoints_are_dropped() {
        let (cache, one) = (LoopsCache::default(), endpoint());
        let mut kept = Vec::new();
        for _ in 0..10 * MIN_SWEPT {
            kept.push(Arc::downgrade(&loops(&cache, &Transfer::new(&one, &endpoint()))));
        }
        let alive = kept.iter().filter(|loops| loops.strong_count() > 0).count();
        assert!(alive <= MIN_SWEPT + 1, "{alive}");
    }
}
