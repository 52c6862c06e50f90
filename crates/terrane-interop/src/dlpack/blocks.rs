//! Exports blocks of an endpoint as tensors, held while they are exported.

use std::sync::Arc;

use terrane_core::{ByteCount, Region};
use terrane_layout::{Geometry, LayoutError, PieceStrides};
use terrane_transfer::{Access, Endpoint, Hold, Ticket};

use super::{ElementType, ExportError, TensorExport, TensorShape};

impl TensorExport {
    /// One piece of a layout, as a row of elements: read-only, or for reading and writing.
    ///
    /// The block is held while the tensor is exported. A conflicting transfer is refused: one that
    /// writes the block, or, for a writable export, one that reads it. It can run after the hold
    /// instead, if it names the hold's [`ticket`](Self::ticket). If transfers already have the
    /// block, the export is refused. The endpoint lives as long as the hold, so no other endpoint
    /// can have its bytes. An endpoint that [shares](Endpoint::sharing) its bytes does not tell the
    /// other endpoints of the hold; the caller keeps them apart.
    ///
    /// # Errors
    ///
    /// [`ExportError::Held`] if the block could not be held. [`ExportError::Layout`] if there is no
    /// such piece. [`ExportError::InParts`] if the layout has no contiguous pieces.
    /// [`ExportError::NotWhole`] if the bytes of a piece are not a multiple of an element's.
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
    /// regions, in the order of the layers. A fully contiguous layout gives one tensor. Where
    /// layers are separate regions, it is one tensor for each layer, whose first axis is 1.
    ///
    /// The block is held until the deleter of the last of them has been called, as
    /// [`of_piece`](Self::of_piece) holds it.
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
    /// regions, as [`of_block`](Self::of_block) has them. All blocks are held.
    ///
    /// For the axes that engines have, see [`kv_tensors`](crate::tensors::kv_tensors).
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
    /// blocks are held, as [`of_piece`](Self::of_piece) holds one.
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

    /// One block, or all with an axis for them.
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
/// It also keeps the endpoint. Otherwise another endpoint could be made over the same bytes, whose
/// transfers do not know of the hold.
pub(crate) struct HeldBlocks {
    // Released before the endpoint ends: fields drop in this order.
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

/// A row of all elements that fit, which must fill the bytes.
fn row(element: ElementType, bytes: ByteCount) -> Result<TensorShape, ExportError> {
    Ok(TensorShape::compact(element, &[whole(element, bytes)?])?)
}

/// The number of elements in so many bytes.
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
