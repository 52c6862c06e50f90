//! Exports blocks of an endpoint as tensors, and holds the blocks as long as the tensors live.

use std::sync::Arc;

use terrane_core::{ByteCount, Region};
use terrane_layout::{Geometry, LayoutError, PieceStrides};
use terrane_transfer::{Access, Endpoint, Hold, Ticket};

use super::{ElementType, ExportError, TensorExport, TensorShape};

impl TensorExport {
    /// One piece of a layout, as a row of elements, read-only or writable.
    ///
    /// The block is held while the tensor is exported. A conflicting transfer is refused: one that
    /// writes the block or, if the export is writable, one that reads it. To run after the hold
    /// instead, the transfer names the hold's [`ticket`](Self::ticket). If a transfer already uses
    /// the block, the export is refused. The endpoint lives as long as the hold, so no other
    /// endpoint can own its bytes. Endpoints that [share](Endpoint::sharing) the bytes do not know
    /// of the hold, so the caller must order their transfers.
    ///
    /// # Errors
    ///
    /// [`ExportError::Held`] if the block could not be held. [`ExportError::Layout`] if the piece
    /// does not exist. [`ExportError::InParts`] if the layout has no contiguous pieces.
    /// [`ExportError::NotWhole`] if the bytes of a piece are not a multiple of an element.
    /// Otherwise as for [`new`](Self::new).
    pub fn of_piece(
        endpoint: &Endpoint,
        (block, layer, outer): (u32, u32, u32),
        element: ElementType,
        access: Access,
    ) -> Result<Self, ExportError> {
        let geometry = endpoint.layout().geometry();
        let at = geometry.try_offset(block, layer, outer).map_err(LayoutError::from)?;
        let bytes = pieces(geometry)?.piece_bytes();
        let piece = region_of(endpoint, at.region)?.view(ByteCount::new(at.offset), bytes)?;
        let shape = row(element, bytes)?;
        let export = Self::build(piece, shape)?;
        Ok(export.held_by(&HeldBlocks::new(endpoint, &[block], access)?).of_access(access))
    }

    /// One block of a layout: a tensor `[layers, outers, elements of a piece]` for each of its
    /// regions, in the order of the layers. A fully contiguous layout has one tensor. If layers are
    /// separate regions, there is one tensor for each layer, whose first axis is 1.
    ///
    /// The block is held until the deleter of the last tensor has been called, as for
    /// [`of_piece`](Self::of_piece).
    ///
    /// # Errors
    ///
    /// As for [`of_piece`](Self::of_piece).
    pub fn of_block(
        endpoint: &Endpoint,
        block: u32,
        element: ElementType,
        access: Access,
    ) -> Result<Vec<Self>, ExportError> {
        Self::of_all(endpoint, Some(block), element, access)
    }

    /// All of a layout: a tensor `[blocks, layers, outers, elements of a piece]` for each of its
    /// regions, as for [`of_block`](Self::of_block). All blocks are held.
    ///
    /// For the axis orders of engines, see [`kv_tensors`](crate::tensors::kv_tensors).
    ///
    /// # Errors
    ///
    /// As for [`of_piece`](Self::of_piece).
    pub fn of_layout(
        endpoint: &Endpoint,
        element: ElementType,
        access: Access,
    ) -> Result<Vec<Self>, ExportError> {
        Self::of_all(endpoint, None, element, access)
    }

    /// A whole region of a layout, as a row of elements, with the padding after its blocks. All
    /// blocks are held, as for [`of_piece`](Self::of_piece).
    ///
    /// # Errors
    ///
    /// [`ExportError::NoRegion`], and as for [`of_piece`](Self::of_piece).
    pub fn of_region(
        endpoint: &Endpoint,
        region: u32,
        element: ElementType,
        access: Access,
    ) -> Result<Self, ExportError> {
        let bytes = endpoint.layout().geometry().region_bytes(region);
        let region = region_of(endpoint, region)?.view(ByteCount::ZERO, bytes)?;
        let export = Self::build(region, row(element, bytes)?)?;
        Ok(export.held_by(&HeldBlocks::new(endpoint, &all(endpoint), access)?).of_access(access))
    }

    /// One block, or all blocks with an axis for them.
    fn of_all(
        endpoint: &Endpoint,
        block: Option<u32>,
        element: ElementType,
        access: Access,
    ) -> Result<Vec<Self>, ExportError> {
        let geometry = endpoint.layout().geometry();
        let first = block.unwrap_or(0);
        let pieces = pieces(geometry)?;
        let layers = match geometry.region_count() {
            1 => geometry.num_layers(),
            _ => 1,
        };
        let elements = whole(element, pieces.piece_bytes())?;
        let axes = [
            (geometry.num_blocks(), pieces.block_stride()),
            (layers, pieces.layer_stride()),
            (geometry.section_count(), pieces.outer_stride()),
        ];
        let mut sizes = Vec::new();
        let mut strides = Vec::new();
        for (size, stride) in axes.into_iter().skip(usize::from(block.is_some())) {
            sizes.push(u64::from(size));
            // Along an axis of one, the stride has no effect.
            strides.push(if size == 1 { elements } else { whole(element, stride)? });
        }
        sizes.push(elements);
        strides.push(1);
        let shape = TensorShape::strided(element, &sizes, &strides)?;
        let mut exports = Vec::new();
        for layer in (0..geometry.num_layers()).step_by(ByteCount::new(layers.into()).to_usize()) {
            let at = geometry.try_offset(first, layer, 0).map_err(LayoutError::from)?;
            let region = region_of(endpoint, at.region)?;
            let region = region.view(ByteCount::new(at.offset), shape.bytes())?;
            exports.push(Self::build(region, shape.clone())?);
        }
        let blocks = block.map_or_else(|| all(endpoint), |block| vec![block]);
        let held = HeldBlocks::new(endpoint, &blocks, access)?;
        let held = |export: Self| export.held_by(&held).of_access(access);
        Ok(exports.into_iter().map(held).collect())
    }

    fn of_access(self, access: Access) -> Self {
        if access == Access::Read { self.read_only() } else { self }
    }
}

/// Blocks that are held until this drops.
///
/// It also keeps the endpoint alive. Otherwise another endpoint could be created over the same
/// bytes, and its transfers would not know of the hold.
pub(crate) struct HeldBlocks {
    // Fields drop in this order, so the hold ends before the endpoint drops.
    hold: Hold,
    _endpoint: Endpoint,
}

impl HeldBlocks {
    /// # Errors
    ///
    /// [`ExportError::Held`].
    pub(crate) fn new(
        endpoint: &Endpoint,
        blocks: &[u32],
        access: Access,
    ) -> Result<Arc<Self>, ExportError> {
        let hold = match access {
            Access::Read => endpoint.hold_for_read(blocks)?,
            Access::Write => endpoint.hold_for_write(blocks)?,
        };
        Ok(Arc::new(Self { hold, _endpoint: endpoint.clone() }))
    }

    pub(crate) fn ticket(&self) -> Ticket {
        self.hold.ticket()
    }
}

/// The numbers of all blocks.
pub(crate) fn all(endpoint: &Endpoint) -> Vec<u32> {
    (0..endpoint.layout().geometry().num_blocks()).collect()
}

fn pieces(geometry: &Geometry) -> Result<&PieceStrides, ExportError> {
    geometry.pieces().ok_or(ExportError::InParts)
}

/// A row of as many elements as fit, which must fill the bytes.
fn row(element: ElementType, bytes: ByteCount) -> Result<TensorShape, ExportError> {
    Ok(TensorShape::compact(element, &[whole(element, bytes)?])?)
}

/// The number of elements in this number of bytes.
fn whole(element: ElementType, bytes: ByteCount) -> Result<u64, ExportError> {
    let refused = || ExportError::NotWhole { bytes, element };
    let width = element.width().filter(|width| !width.is_zero()).ok_or_else(refused)?;
    let is_whole = bytes.get().is_multiple_of(width.get());
    bytes.get().checked_div(width.get()).filter(|_| is_whole).ok_or_else(refused)
}

fn region_of(endpoint: &Endpoint, region: u32) -> Result<&Region, ExportError> {
    let regions = endpoint.layout().regions();
    let found = regions.get(ByteCount::new(region.into()).to_usize());
    found.ok_or(ExportError::NoRegion { region, regions: regions.len() })
}
