//! The reasons why a transfer was refused, or failed.

use std::ops::Range;
use std::time::Duration;

use terrane_core::{BoxedCause, ByteCount, ForkedProcess, SizeOverflow, StorageKind};
use terrane_layout::{LayoutError, SectionName};

use crate::checksums::ChecksumDifference;
use crate::engine::declined::Declined;
use crate::hazard::conflict::BlockConflict;
use crate::hazard::ticket::TransferId;
use crate::side::Side;

/// The reason why a transfer was refused before it started, or failed afterwards.
///
/// [`is_refusal`](Self::is_refusal) distinguishes the two: a refused transfer has copied nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The blocks of the two layouts have different shapes.
    #[error(
        "the blocks have different {field}: {from} in the source, {to} in the destination; use layouts \
         of equal shape, or name the heads or tokens to copy (Transfer::heads, Transfer::tokens)"
    )]
    ShapeMismatch {
        /// The first field of the layouts' configs that differs.
        field: &'static str,
        /// Its value in the source.
        from: u64,
        /// Its value in the destination.
        to: u64,
    },
    /// A section of the source has no counterpart.
    #[error(
        "the {side} has no section {section}; sections are matched by name, so give both layouts \
         equal names"
    )]
    NoSuchSection {
        /// The section.
        section: SectionName,
        /// The side without the section.
        side: Side,
    },
    /// Only some layers were requested, and a section has no layers.
    #[error(
        "section {section} of the {side} has no layers, so its layers cannot be selected or copied \
         one by one; copy all layers together"
    )]
    SectionHasNoLayers {
        /// The section.
        section: SectionName,
        /// The side.
        side: Side,
    },
    /// Only some heads were requested, and the sections have different numbers of them.
    #[error(
        "the sections of the {side} have different numbers of heads, so heads cannot be selected; copy \
         all heads"
    )]
    HeadsDiffer {
        /// The side.
        side: Side,
    },
    /// The token range is empty or out of range.
    #[error(
        "tokens {}..{} requested, and a section of the {side} has {num_tokens}; name a range that is \
         not empty, within 0..{num_tokens}",
        .tokens.start, .tokens.end
    )]
    NoSuchTokens {
        /// The side.
        side: Side,
        /// The requested tokens.
        tokens: Range<u32>,
        /// The tokens of the section.
        num_tokens: u32,
    },
    /// Different numbers of source and destination tokens were named.
    #[error("{from} source tokens for {to} destination tokens; name equally many of each")]
    UnequalTokenCounts {
        /// Tokens named in the source.
        from: u32,
        /// Tokens named in the destination.
        to: u32,
    },
    /// Different numbers of source and destination blocks were named.
    #[error("{from} source blocks for {to} destination blocks; name equally many of each")]
    UnequalBlockCounts {
        /// Blocks named in the source.
        from: usize,
        /// Blocks named in the destination.
        to: usize,
    },
    /// A block does not exist.
    #[error(
        "{side} block {block} does not exist; the layout has {num_blocks} blocks, so name ids below \
         {num_blocks}"
    )]
    NoSuchBlock {
        /// The side.
        side: Side,
        /// The block that was named.
        block: u32,
        /// The number of blocks in the layout.
        num_blocks: u32,
    },
    /// A block would be written twice.
    #[error(
        "destination block {block} is named twice, so its content would be undefined; name each \
         destination once"
    )]
    DuplicateDestination {
        /// The block.
        block: u32,
    },
    /// The layer range is empty or out of range.
    #[error(
        "layers {}..{} requested, and the blocks have {num_layers} layers; name a range that is not \
         empty, within 0..{num_layers}",
        .layers.start, .layers.end
    )]
    NoSuchLayers {
        /// The requested layers.
        layers: Range<u32>,
        /// The number of layers in the layout.
        num_layers: u32,
    },
    /// The head range is empty or out of range.
    #[error(
        "heads {}..{} are not a range within the {num_heads} heads of the {side}; name a range that \
         is not empty, within 0..{num_heads}",
        .heads.start, .heads.end
    )]
    NoSuchHeads {
        /// The side.
        side: Side,
        /// The requested heads.
        heads: Range<u32>,
        /// The number of heads.
        num_heads: u32,
    },
    /// Different numbers of source and destination heads were named.
    #[error("{from} source heads for {to} destination heads; name equally many of each")]
    UnequalHeadCounts {
        /// Heads named in the source.
        from: u32,
        /// Heads named in the destination.
        to: u32,
    },
    /// The transfer has to address single heads, and a layout does not state their number.
    #[error(
        "this transfer copies heads separately, and the {side} layout does not state its heads; \
         state num_heads and token_order in its config"
    )]
    HeadsNotStated {
        /// The side.
        side: Side,
    },
    /// The transfer would write bytes that it also reads.
    #[error(
        "destination block {destination} overlaps source block {source_block}; \
         copy through other blocks"
    )]
    Overlap {
        /// The block that is read.
        source_block: u32,
        /// The block that is written.
        destination: u32,
    },
    /// A device takes part, and the transfer does not state its device order.
    #[error(
        "the {side} is memory of {kind}, and the transfer states no device order; add one \
         (Transfer::device_order)"
    )]
    OrderNotStated {
        /// The side that is on a device.
        side: Side,
        /// Its kind.
        kind: StorageKind,
    },
    /// A device order was stated, and no device takes part.
    #[error("a device order is stated, but neither end is device memory; leave it out")]
    OrderWithoutDevice,
    /// The device order of a transfer that waits for others could not be captured.
    #[error(
        "engine {engine} cannot capture the device order of a transfer that waits for others; see \
         the cause, or submit the transfer when the others have ended"
    )]
    OrderNotCaptured {
        /// The engine.
        engine: &'static str,
        /// The cause.
        source: BoxedCause,
    },
    /// Durability was requested, and no file is written.
    #[error(
        "durability is requested, but the destination is {kind} memory and not a file; leave it out"
    )]
    DurabilityWithoutFile {
        /// The kind of the destination.
        kind: StorageKind,
    },
    /// No engine copies between these kinds of storage.
    #[error("no engine copies from {from} to {to}{}", declined_text(.declined))]
    NoEngine {
        /// The kind of the source.
        from: StorageKind,
        /// The kind of the destination.
        to: StorageKind,
        /// The reason of each engine.
        declined: Vec<(&'static str, Declined)>,
    },
    /// The transfer has a notification, and neither end is a peer's.
    #[error(
        "a notification is requested, but neither {from} memory nor {to} memory belongs to a peer; \
         leave it out"
    )]
    NotificationWithoutPeer {
        /// The kind of the source.
        from: StorageKind,
        /// The kind of the destination.
        to: StorageKind,
    },
    /// Other operations in flight use the same blocks.
    #[error("{}", conflict_text(.conflicts))]
    Conflict {
        /// The conflicts: at least one, and at most 1,000 for each end.
        conflicts: Vec<BlockConflict>,
    },
    /// The position of a piece could not be computed.
    #[error("the layout cannot compute the position of a piece; see the cause")]
    Layout(#[from] LayoutError),
    /// A size does not fit in 64 bits.
    #[error("the size of the transfer exceeds 64 bits; see the cause, and copy fewer blocks")]
    Size(#[from] SizeOverflow),
    /// The transfer would read blocks that a failed transfer may have written in part. They stay
    /// incomplete until a transfer or a [hold](crate::Endpoint::hold_for_write) has written again
    /// everything that the failed transfer was to write.
    #[error(
        "{}; write it again, or allow such blocks (Transfer::allow_incomplete)",
        incomplete_text(.blocks)
    )]
    Incomplete {
        /// Every incomplete source block; at least one.
        blocks: Vec<u32>,
    },
    /// A manager, a planner or an endpoint belongs to the process that this one was forked from.
    #[error(
        "the transfer uses a manager or an endpoint of the process that this one was forked from; make \
         new ones after the fork"
    )]
    Forked(#[from] ForkedProcess),
    /// The transfer belongs to the process that this one was forked from. It continues there.
    #[error(
        "the transfer belongs to the process that this one was forked from; wait for it in that \
         process"
    )]
    LostByFork,
    /// A transfer that this one runs after failed, so this one was not started.
    #[error(
        "not started, because its predecessor, transfer {predecessor}, failed; submit it again after a \
         success, or use Transfer::after_end if only the order matters"
    )]
    PredecessorFailed {
        /// The transfer that failed.
        predecessor: TransferId,
    },
    /// Checksums were requested, and only some layers or heads are copied.
    #[error(
        "checksums are those of whole blocks, and this transfer copies some of the {part}; copy all \
         {part}, or leave the checksums out"
    )]
    ChecksumOfPart {
        /// `"layers"` or `"heads"`.
        part: &'static str,
    },
    /// Different numbers of checksums and of blocks were named.
    #[error("{sums} checksums for {blocks} blocks; name one checksum for each block")]
    UnequalChecksumCounts {
        /// The checksums.
        sums: usize,
        /// The blocks.
        blocks: usize,
    },
    /// Blocks have other checksums than the expected ones. All blocks have been copied.
    #[error("{}; discard them, and restore their content from another source", mismatch_text(.blocks))]
    ChecksumMismatch {
        /// Every block whose checksum differs; at least one.
        blocks: Vec<ChecksumDifference>,
    },
    /// An engine could not be started, so no manager was created.
    #[error("the {engine} engine could not be started; see the cause, or reduce its options")]
    EngineNotStarted {
        /// The engine.
        engine: &'static str,
        /// The cause.
        #[source]
        source: BoxedCause,
    },
    /// A run could not be copied. Other runs may have been.
    #[error(
        "copying source block {source_block} to destination block {destination_block} failed, in a \
         run of {bytes}; see the cause, and copy the blocks again"
    )]
    Copy {
        /// The source block where the copy stopped. If the engine does not know it, the block where
        /// the run begins.
        source_block: u32,
        /// The destination block, in the same way.
        destination_block: u32,
        /// The length of the run, which may span many blocks.
        bytes: ByteCount,
        /// The engine's error.
        #[source]
        source: BoxedCause,
    },
    /// The engine failed as a whole. Any of the runs may have been copied.
    #[error("engine {engine} failed; see the cause, and copy the blocks again")]
    Engine {
        /// The engine.
        engine: &'static str,
        /// The engine's error.
        #[source]
        source: BoxedCause,
    },
    /// The transfer's deadline passed. Any of the runs may have been copied; no more will be. If it
    /// passed before the copy started, the destination is unchanged.
    #[error("the deadline passed after {}; {done} of {total} had been copied; copy the blocks again, with a \
         later deadline", seconds(.after))]
    DeadlineExceeded {
        /// The time from submission.
        after: Duration,
        /// The bytes copied by then.
        done: ByteCount,
        /// The bytes to copy.
        total: ByteCount,
    },
    /// The transfer was [cancelled](crate::Ticket::cancel).
    #[error("the transfer was cancelled {}", cancelled_text(*.started, *.done, *.total))]
    Cancelled {
        /// Whether the copy had started. If not, the destination is unchanged. If it had, any of
        /// the runs may have been copied.
        started: bool,
        /// The bytes copied by then.
        done: ByteCount,
        /// The bytes to copy.
        total: ByteCount,
    },
    /// The engine dropped the transfer without a result.
    #[error(
        "the engine stopped before the transfer had ended, and some runs may have been copied; copy \
         the blocks again"
    )]
    EngineStopped,
}

impl TransferError {
    pub(crate) fn not_started(engine: &'static str, source: impl Into<BoxedCause>) -> Self {
        Self::EngineNotStarted { engine, source: source.into() }
    }

    /// Whether the transfer was refused, or cancelled, before it started: nothing was copied.
    #[must_use]
    pub const fn is_refusal(&self) -> bool {
        !matches!(
            self,
            Self::Copy { .. }
                | Self::Engine { .. }
                | Self::DeadlineExceeded { .. }
                | Self::Cancelled { started: true, .. }
                | Self::ChecksumMismatch { .. }
                | Self::EngineStopped
                | Self::LostByFork
        )
    }

    /// Whether the same transfer could succeed once others have ended.
    #[must_use]
    pub const fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict { .. })
    }
}

/// A transfer that was refused: the caller's guard, and the cause. Nothing was copied.
pub struct Rejected<G> {
    /// The guard that the caller passed.
    pub guard: G,
    /// The cause.
    pub cause: TransferError,
}

// The guard need not be `Debug`: only the cause is shown.
terrane_core::debug_fields!(Rejected<G> { cause });

terrane_core::delegate_error!(Rejected<G>, into TransferError);

fn seconds(duration: &Duration) -> String {
    format!("{:.3} s", duration.as_secs_f64())
}

fn cancelled_text(started: bool, done: ByteCount, total: ByteCount) -> String {
    if started {
        format!("when {done} of {total} had been copied; write its destination again")
    } else {
        "before it started; nothing was copied".to_owned()
    }
}

fn declined_text(declined: &[(&'static str, Declined)]) -> String {
    if declined.is_empty() {
        return "; the manager has no engines, so add one to its builder".to_owned();
    }
    let reasons: Vec<_> = declined.iter().map(|(engine, why)| format!("{engine}: {why}")).collect();
    format!(" ({})", reasons.join("; "))
}

fn incomplete_text(blocks: &[u32]) -> String {
    let noun = if blocks.len() == 1 { "block" } else { "blocks" };
    let listed = first_four(blocks, ", ", u32::to_string);
    format!("a failed transfer may have written source {noun} {listed} in part")
}

fn mismatch_text(blocks: &[ChecksumDifference]) -> String {
    first_four(blocks, "; ", |differs| {
        let ChecksumDifference { source_block, destination_block, expected, found } = differs;
        format!(
            "source block {source_block}, copied to destination block {destination_block}, has \
             checksum {found:#018x}, and {expected:#018x} was expected"
        )
    })
}

fn conflict_text(conflicts: &[BlockConflict]) -> String {
    let listed = first_four(conflicts, ", ", |conflict| {
        let BlockConflict { side, block, held, holder, .. } = conflict;
        format!("{side} block {block} is in use (being {held}) by transfer or hold {holder}")
    });
    let (them, tickets) = match conflicts {
        [_] => ("it", "its ticket"),
        _ => ("them", "their tickets"),
    };
    format!("{listed}; wait for {them} to end or drop, or order this transfer after {tickets}")
}

/// The texts of the first four items, and the number of the others.
fn first_four<T>(items: &[T], separator: &str, text: impl Fn(&T) -> String) -> String {
    const SHOWN: usize = 4;
    let mut texts: Vec<_> = items.iter().take(SHOWN).map(text).collect();
    if items.len() > SHOWN {
        texts.push(format!("and {} more", items.len() - SHOWN));
    }
    texts.join(separator)
}
