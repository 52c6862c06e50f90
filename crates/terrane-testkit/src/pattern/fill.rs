//! Writes the pattern into the blocks of a layout.

use std::ops::Range;
use std::thread;

use terrane_core::{BoxedCause, ByteCount, Location};
use terrane_layout::{LayoutError, PhysicalLayout};
use terrane_transfer::{Endpoint, TransferError};

use super::{InProcess, Pattern, Piece, PieceAccess};

/// The reason why the pattern could not be filled in or verified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PatternError {
    /// A block does not exist, or a transfer in flight uses it.
    #[error("the blocks cannot be used at the moment")]
    Blocks(#[from] TransferError),
    /// A piece does not exist.
    #[error("the layout has no such piece")]
    Layout(#[from] LayoutError),
    /// A piece could not be read or written.
    #[error("{piece:?} at {at} could not be accessed")]
    Access {
        /// The piece.
        piece: Piece,
        /// The start of the failed access.
        at: Location,
        /// The reason.
        #[source]
        source: BoxedCause,
    },
}

/// Pieces are processed in steps that fit into a core's cache.
const STEP: usize = 64 << 10;

impl Pattern {
    /// Fills all blocks of a layout.
    ///
    /// # Errors
    ///
    /// [`PatternError`], for example if a transfer in flight uses one of the blocks.
    pub fn fill(&self, end: &Endpoint) -> Result<(), PatternError> {
        let blocks: Vec<u32> = (0..end.layout().geometry().num_blocks()).collect();
        self.fill_blocks(end, &blocks)
    }

    /// Fills these blocks, in all layers.
    ///
    /// # Errors
    ///
    /// [`PatternError`], for example if a transfer in flight uses one of the blocks.
    pub fn fill_blocks(&self, end: &Endpoint, blocks: &[u32]) -> Result<(), PatternError> {
        self.fill_with(end, blocks, &InProcess)
    }

    /// Fills these blocks through `access`.
    ///
    /// # Errors
    ///
    /// [`PatternError`], for example if a transfer in flight uses one of the blocks.
    pub fn fill_with(
        &self,
        end: &Endpoint,
        blocks: &[u32],
        access: &impl PieceAccess,
    ) -> Result<(), PatternError> {
        let _hold = end.hold_for_write(blocks)?;
        // SAFETY: the endpoint keeps the memory alive, and no transfer uses the blocks while they
        // are held.
        unsafe { self.fill_layout(end.layout(), blocks, access) }
    }

    /// Fills blocks of a layout that is not an endpoint (yet).
    ///
    /// # Safety
    ///
    /// No other code reads or writes the blocks during the call.
    ///
    /// # Errors
    ///
    /// [`PatternError`] for the first piece that failed.
    pub unsafe fn fill_layout(
        &self,
        layout: &PhysicalLayout,
        blocks: &[u32],
        access: &impl PieceAccess,
    ) -> Result<(), PatternError> {
        let layers = 0..layout.geometry().num_layers();
        self.in_parallel(blocks, |blocks| {
            let mut buffer = vec![0; STEP];
            let each = |piece, at: Location, offset: u64, step: usize| {
                self.write(piece, offset, &mut buffer[..step]);
                // SAFETY: the layout keeps the memory alive, and the caller excludes other users.
                unsafe { access.write(at, &buffer[..step]) }
            };
            in_steps(layout, blocks.iter().copied(), layers.clone(), each)
        })?;
        Ok(())
    }

    /// Processes parts of `items` on the pattern's threads; returns the first error.
    pub(super) fn in_parallel<T: Sync, R: Send>(
        &self,
        items: &[T],
        work: impl Fn(&[T]) -> Result<R, PatternError> + Sync,
    ) -> Result<Vec<R>, PatternError> {
        let part = items.len().div_ceil(self.threads.get()).max(1);
        if items.len() <= part {
            return Ok(vec![work(items)?]);
        }
        thread::scope(|scope| {
            let workers: Vec<_> =
                items.chunks(part).map(|part| scope.spawn(|| work(part))).collect();
            let join = |worker: thread::ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().map(join).collect()
        })
    }
}

/// Calls `each` with every step of every piece: the piece, the start of the step in memory and in
/// the piece, and its length.
pub(super) fn in_steps(
    layout: &PhysicalLayout,
    blocks: impl Iterator<Item = u32>,
    layers: Range<u32>,
    mut each: impl FnMut(Piece, Location, u64, usize) -> Result<(), BoxedCause>,
) -> Result<(), PatternError> {
    let pieces = layout.geometry().pieces().ok_or(LayoutError::NoPieces)?;
    let piece_bytes = pieces.piece_bytes().to_usize();
    for block in blocks {
        for layer in layers.clone() {
            for outer in 0..layout.geometry().section_count() {
                let piece = Piece { block, layer, outer };
                let begin = layout.location(block, layer, outer)?;
                for offset in (0..piece_bytes).step_by(STEP) {
                    let step = STEP.min(piece_bytes - offset);
                    let offset = ByteCount::from_usize(offset);
                    let at = begin.checked_add(offset).expect("within the layout");
                    each(piece, at, offset.get(), step).map_err(|source| PatternError::Access {
                        piece,
                        at,
                        source,
                    })?;
                }
            }
        }
    }
    Ok(())
}
