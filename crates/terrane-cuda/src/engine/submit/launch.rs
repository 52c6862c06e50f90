//! Parts of a transfer as arguments of the copy kernel.

use terrane_transfer::{CopyGrid, GridEnd};

use crate::engine::geometry::index;
use crate::engine::geometry::packing::{Chunk, PackedStrides};
use crate::engine::resources::base_tables::BaseTables;
use crate::engine::resources::device_mapping::DeviceMapping;
use crate::error::CudaError;
use crate::kernels::{BlockIds, GridLaunch, INLINE_BLOCKS, Kernels, LaunchEnd};
use crate::runtime::stream::Stream;

/// The contents of one end, for the kernel.
#[derive(Clone, Copy)]
pub(crate) enum KernelEnd<'a> {
    /// Blocks of a layout.
    Layout {
        mapping: &'a DeviceMapping,
        end: &'a GridEnd,
        /// The ids for all pairs of the transfer.
        blocks: &'a [u32],
        /// The same ids in the device's memory, if they are there; or null.
        list: u64,
    },
    /// A buffer on the device, packed for `end`.
    Packed { address: u64, strides: PackedStrides, end: &'a GridEnd },
}

impl<'a> KernelEnd<'a> {
    /// The ids of some pairs' blocks that a launch carries; none for a packed end.
    fn blocks(self, first: u32, pairs: u32) -> &'a [u32] {
        match self {
            Self::Layout { blocks, list: 0, .. } => {
                blocks.get(index(first)..index(first + pairs)).unwrap_or_default()
            }
            Self::Layout { .. } | Self::Packed { .. } => &[],
        }
    }
}

/// The inputs of launches.
pub(crate) struct Launcher<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) tables: &'a BaseTables,
    pub(crate) stream: &'a Stream,
    pub(crate) ctas: u32,
}

impl Launcher<'_> {
    /// Submits the copy of a chunk, in as many launches as its block ids need.
    ///
    /// # Errors
    ///
    /// [`CudaError::NotReached`] if the device cannot access an end, which no quote allows; the
    /// errors of the driver. Some of the launches may have been submitted.
    ///
    /// # Safety
    ///
    /// The chunk belongs to a validated transfer between the layouts of these ends, or to a buffer
    /// that is large enough. Nothing else uses the copied bytes until the copy has
    /// completed.
    pub(crate) unsafe fn copy(
        &self,
        grid: &CopyGrid,
        chunk: &Chunk,
        source: KernelEnd<'_>,
        destination: KernelEnd<'_>,
    ) -> Result<(), CudaError> {
        // Clearing the ids reads less memory than copying a constant.
        let mut arguments = GridLaunch {
            pairs: 0,
            layers: chunk.layers.end - chunk.layers.start,
            outers: grid.outers,
            rows: grid.rows,
            columns: grid.columns,
            reserved: 0,
            bytes: grid.bytes.get(),
            source: self.end(chunk, source)?,
            destination: self.end(chunk, destination)?,
            inline_blocks: [0; INLINE_BLOCKS],
        };
        let mut first = chunk.pairs.start;
        while first < chunk.pairs.end {
            let left = chunk.pairs.end - first;
            let pairs = fill_blocks(&mut arguments, chunk, [source, destination], first, left);
            // SAFETY: the caller guarantees it. The grid's definition gives the addresses of the
            // chunk's cells.
            unsafe { self.kernels.copy(self.stream, &arguments, self.ctas) }?;
            first += pairs;
        }
        Ok(())
    }

    /// An end without its blocks.
    fn end(&self, chunk: &Chunk, end: KernelEnd<'_>) -> Result<LaunchEnd, CudaError> {
        match end {
            KernelEnd::Packed { address, strides, end } => Ok(LaunchEnd {
                base: address + strides.offset,
                block_stride: strides.pair,
                layer_stride: strides.layer,
                outer_stride: strides.outer,
                row_stride: end.row_stride,
                column_stride: end.column_stride,
                ..LaunchEnd::default()
            }),
            KernelEnd::Layout { mapping, end, .. } => {
                let layer = chunk.layers.start;
                let found = mapping.kernel_base(self.tables, end, layer, self.stream)?;
                let Some(found) = found else {
                    let device = self.stream.context().device().id;
                    return Err(CudaError::NotReached { device });
                };
                let layer_offset = u64::from(layer).wrapping_mul(end.layer_stride);
                Ok(LaunchEnd {
                    base: found.base.wrapping_add(end.offset).wrapping_add(layer_offset),
                    bases: found.table,
                    bases_bits: found.table_bits,
                    block_stride: end.block_stride,
                    layer_stride: end.layer_stride.wrapping_add(found.layer_step),
                    outer_stride: end.outer_stride,
                    row_stride: end.row_stride,
                    column_stride: end.column_stride,
                    ..LaunchEnd::default()
                })
            }
        }
    }
}

/// The bytes of an id in a list.
const ID_BYTES: u64 = 4;

/// Sets the blocks of at most `left` pairs, starting at `first`, as many as fit. Returns their
/// number. In a packed end, pairs are consecutive, starting at the chunk's first pair.
fn fill_blocks(
    arguments: &mut GridLaunch,
    chunk: &Chunk,
    ends: [KernelEnd<'_>; 2],
    first: u32,
    left: u32,
) -> u32 {
    let lists = ends.map(|end| end.blocks(first, left));
    let carried = lists.iter().filter(|list| !list.is_empty()).count();
    let most = INLINE_BLOCKS.checked_div(carried).and_then(|most| u32::try_from(most).ok());
    let pairs = most.map_or(left, |most| most.min(left));
    arguments.pairs = pairs;
    let mut at = 0_usize;
    let arguments_ends = [&mut arguments.source, &mut arguments.destination];
    for ((end, list), which) in arguments_ends.into_iter().zip(lists).zip(ends) {
        match which {
            KernelEnd::Layout { list: listed @ 1.., .. } => {
                end.block_ids = BlockIds::Listed;
                end.blocks = listed + u64::from(first) * ID_BYTES;
            }
            KernelEnd::Layout { .. } => {
                end.block_ids = BlockIds::Inline;
                end.first_inline = u32::try_from(at).unwrap_or(u32::MAX);
                let to = arguments.inline_blocks.get_mut(at..at + index(pairs));
                if let (Some(to), Some(from)) = (to, list.get(..index(pairs))) {
                    to.copy_from_slice(from);
                }
                at += index(pairs);
            }
            KernelEnd::Packed { address, strides, .. } => {
                end.block_ids = BlockIds::Identity;
                let pair_offset = u64::from(first - chunk.pairs.start).wrapping_mul(strides.pair);
                end.base = (address + strides.offset).wrapping_add(pair_offset);
            }
        }
    }
    pairs
}
