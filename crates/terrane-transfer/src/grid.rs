//! A transfer as strides, for engines that compute addresses instead of reading a list of them.

use terrane_core::ByteCount;
use terrane_layout::{ContiguousUnit, Geometry};

use crate::cells::CellsOfEnd;
use crate::{Side, TransferPlan};

/// A plan as nested counts, with the strides of both ends.
///
/// For every pair of blocks of the plan, `layers · outers · rows · columns` cells of
/// [`bytes`](Self::bytes) each are copied. A cell is contiguous at both ends and as long as the
/// geometries of both ends let it be; neighbouring blocks are not joined.
///
/// The cell (pair, layer, outer, row, column), each index counted from 0, lies at one end in
/// region `first_region + layer · regions_per_layer`, at
///
/// ```text
/// offset + block(pair) · block_stride + layer · layer_stride + outer · outer_stride
///        + row · row_stride + column · column_stride
/// ```
///
/// where `block(pair)` is the id of that end's block. All of it is within the regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyGrid {
    /// Layers that are apart at one end at least; 1 where whole blocks are contiguous at both,
    /// unless the transfer is [layer-wise](crate::Transfer::layer_wise).
    pub layers: u32,
    /// Outers that are apart at one end at least; 1 where they are adjacent at both.
    pub outers: u32,
    /// Rows within a piece that are apart at one end at least: tokens, where the orders of tokens and
    /// heads differ or some heads are copied; 1 elsewhere.
    pub rows: u32,
    /// Columns within a row that are apart at one end at least: heads, where the orders of tokens and
    /// heads differ; 1 elsewhere.
    pub columns: u32,
    /// The length of a cell.
    pub bytes: ByteCount,
    /// Where the cells come from.
    pub source: GridEnd,
    /// Where they go.
    pub destination: GridEnd,
}

/// One end of a [`CopyGrid`]. Strides are in bytes; that of a dimension of one means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GridEnd {
    /// The region of the first layer.
    pub first_region: u32,
    /// 1 where each layer has a region of its own, 0 where all share one.
    pub regions_per_layer: u32,
    /// Of the first cell of block 0, from the beginning of its region.
    pub offset: u64,
    /// From a block to the next id.
    pub block_stride: u64,
    /// From a layer to the next.
    pub layer_stride: u64,
    /// From an outer to the next.
    pub outer_stride: u64,
    /// From a row to the next.
    pub row_stride: u64,
    /// From a column to the next.
    pub column_stride: u64,
}

impl CopyGrid {
    /// One end.
    #[must_use]
    pub const fn end(&self, side: Side) -> &GridEnd {
        match side {
            Side::Source => &self.source,
            Side::Destination => &self.destination,
        }
    }

    pub(crate) fn of(plan: &TransferPlan) -> Self {
        let geometries = [&plan.source, &plan.destination].map(|end| end.layout().geometry());
        let [source, destination] = geometries;
        let unit = plan.unit();
        let layers = plan.layers.end - plan.layers.start;
        let outers = source.outer_dim();
        let (layers, outers, pieces) = match unit {
            ContiguousUnit::Piece => (layers, outers, 1),
            ContiguousUnit::Layer => (layers, 1, u64::from(outers)),
            ContiguousUnit::Block => (1, 1, u64::from(outers) * u64::from(layers)),
        };
        let cells = plan.cells.as_ref();
        let end = |geometry: &Geometry, layer, cells: Option<&CellsOfEnd>| {
            let first = geometry.offset(0, layer, 0);
            GridEnd {
                first_region: first.region,
                regions_per_layer: u32::from(geometry.region_count() > 1),
                offset: first.offset + cells.map_or(0, |cells| cells.offset),
                block_stride: geometry.block_stride().get(),
                layer_stride: geometry.layer_stride().get(),
                outer_stride: geometry.outer_stride().get(),
                row_stride: cells.map_or(0, |cells| cells.row_stride),
                column_stride: cells.map_or(0, |cells| cells.column_stride),
            }
        };
        Self {
            layers,
            outers,
            rows: cells.map_or(1, |cells| cells.rows),
            columns: cells.map_or(1, |cells| cells.columns),
            // At most the bytes of a block, which its config proved to fit.
            bytes: ByteCount::new(
                cells.map_or_else(|| source.piece_bytes().get() * pieces, |cells| cells.bytes),
            ),
            source: end(source, plan.layers.start, cells.map(|cells| &cells.source)),
            destination: end(destination, plan.landing, cells.map(|cells| &cells.destination)),
        }
    }
}
