//! A transfer request: the blocks of both ends, and the options.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::checksums::Checksums;
use crate::engine::order::DeviceOrder;
use crate::hazard::endpoint::Endpoint;
use crate::hazard::ticket::Ticket;
use crate::side::Ends;
use terrane_core::Durability;

/// A transfer of blocks from one layout to another of equal shape.
///
/// Shapes are equal if sections have equal names, layers, tokens and rows. All strides may differ;
/// rows are copied to their positions in the destination. If both layouts state their heads, only
/// the lengths of heads must be equal. [Some heads](Self::heads) of one layout can be copied to
/// another layout that has more.
///
/// Nothing is checked before the submission.
///
/// ```compile_fail,E0382
/// # use terrane_transfer::{Transfer, TransferManager};
/// # fn example(manager: &TransferManager, transfer: Transfer, guard: Vec<u8>) {
/// let completion = manager.submit(transfer, guard);
/// drop(guard); // The transfer owns it now, and gives it back with the outcome.
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a transfer does nothing until it is submitted"]
pub struct Transfer {
    pub(crate) source: Endpoint,
    pub(crate) destination: Endpoint,
    pub(crate) source_blocks: Vec<u32>,
    pub(crate) destination_blocks: Vec<u32>,
    /// `None` for all layers.
    pub(crate) layers: Option<Range<u32>>,
    /// `None` for all heads of both ends.
    pub(crate) heads: Option<Ends<Range<u32>>>,
    /// `None` for all tokens.
    pub(crate) tokens: Option<Ends<Range<u32>>>,
    /// The first layer at the destination; `None` for that of the source. If set, the ends may
    /// differ in their number of layers.
    pub(crate) destination_first_layer: Option<u32>,
    pub(crate) after: Vec<Predecessor>,
    pub(crate) allow_incomplete: bool,
    pub(crate) options: TransferOptions,
}

/// A ticket that a transfer runs after.
#[derive(Clone, Debug)]
pub(crate) struct Predecessor {
    pub(crate) ticket: Ticket,
    /// Whether this transfer fails without starting if the predecessor fails.
    pub(crate) has_to_succeed: bool,
}

impl Transfer {
    /// A transfer of all layers, with no blocks yet.
    pub fn new(source: &Endpoint, destination: &Endpoint) -> Self {
        Self {
            source: source.clone(),
            destination: destination.clone(),
            source_blocks: Vec::new(),
            destination_blocks: Vec::new(),
            layers: None,
            heads: None,
            tokens: None,
            destination_first_layer: None,
            after: Vec::new(),
            allow_incomplete: false,
            options: TransferOptions::default(),
        }
    }

    /// Adds pairs of blocks: the n-th of `source` is copied to the n-th of `destination`. The order
    /// of the pairs does not matter; no destination may be named twice.
    pub fn blocks(mut self, source: &[u32], destination: &[u32]) -> Self {
        self.source_blocks.extend_from_slice(source);
        self.destination_blocks.extend_from_slice(destination);
        self
    }

    /// Whether it copies all layers, heads and tokens to their own positions.
    pub(crate) const fn copies_whole_blocks(&self) -> bool {
        let Self { layers, heads, tokens, destination_first_layer, .. } = self;
        layers.is_none() && heads.is_none() && tokens.is_none() && destination_first_layer.is_none()
    }

    /// Copies only these layers, to the same layers of the destination.
    pub fn layers(self, layers: Range<u32>) -> Self {
        Self { layers: Some(layers), ..self }
    }

    /// Copies only these heads of the source's blocks, to an equal number of the destination's.
    /// Both layouts [state](terrane_layout::LayoutConfigBuilder::num_heads) their heads, and their
    /// numbers may differ. For example, a tensor-parallel rank has 2 of 8 heads. It reads and
    /// writes its share of a page with all heads, while other ranks do the same.
    pub fn heads(self, source: Range<u32>, destination: Range<u32>) -> Self {
        Self { heads: Some(Ends { source, destination }), ..self }
    }

    /// Copies only these tokens of the source's blocks, to an equal number of the destination's.
    ///
    /// Claims are on whole blocks, so transfers of different tokens of one block conflict. After a
    /// failure, only these tokens are [incomplete](crate::TransferError::Incomplete), and a success
    /// completes only these.
    pub fn tokens(self, source: Range<u32>, destination: Range<u32>) -> Self {
        Self { tokens: Some(Ends { source, destination }), ..self }
    }

    /// Starts only when the ticket's transfer has succeeded. If that transfer fails, this one fails
    /// without starting. May be called several times.
    ///
    /// Blocks that the earlier transfer uses do not conflict then.
    ///
    /// Use this for a transfer that reads the earlier one's destination. A transfer that only waits
    /// for blocks to be free runs [after the end](Self::after_end) of the earlier one.
    pub fn after(mut self, ticket: &Ticket) -> Self {
        self.after.push(Predecessor { ticket: ticket.clone(), has_to_succeed: true });
        self
    }

    /// Starts only when the ticket's transfer has ended, whether it has succeeded or failed. May be
    /// called several times.
    ///
    /// Blocks that the earlier transfer uses do not conflict then. If it fails half-way, its
    /// destination is [incomplete](crate::TransferError::Incomplete). This transfer may write that
    /// destination, and reads it only if it [may](Self::allow_incomplete).
    pub fn after_end(mut self, ticket: &Ticket) -> Self {
        self.after.push(Predecessor { ticket: ticket.clone(), has_to_succeed: false });
        self
    }

    /// Allows reads of source blocks that a failed transfer may have written in part.
    ///
    /// The destination then counts as written, whatever the bytes are. Without this, such a
    /// transfer is refused with [`TransferError::Incomplete`](crate::TransferError::Incomplete).
    pub fn allow_incomplete(mut self) -> Self {
        self.allow_incomplete = true;
        self
    }

    /// Sets the device work that the copy runs after, as of the submission. This also applies to a
    /// transfer that runs [after](Self::after) others. It is required if a device takes part, and
    /// an error otherwise. The transfer keeps the order's stream or event until it has ended.
    pub fn device_order(mut self, order: DeviceOrder) -> Self {
        self.options.device_order = Some(order);
        self
    }

    /// Minimum durability of written files on success. A file's own setting applies if it is
    /// stricter. A transfer that writes no file accepts only [`Durability::None`].
    pub fn durability(mut self, durability: Durability) -> Self {
        self.options.durability = durability;
        self
    }

    /// Reports the state of each layer ([`Completion::layers`]), so that layer 0 can be used while
    /// layer 1 travels. Layers are then copied in order.
    ///
    /// Reduces bandwidth if layers would otherwise be copied together.
    ///
    /// [`Completion::layers`]: crate::Completion::layers
    pub fn layer_by_layer(mut self) -> Self {
        self.options.layer_by_layer = true;
        self
    }

    /// Computes the checksum of each block, or compares it with an expected one.
    ///
    /// All layers and heads must be copied. The host and disk engines compute checksums if this
    /// crate has the feature `checksum`, and so do relays. Between files, the blocks of the source
    /// must be in canonical order. The device engine computes checksums with kernels. Other engines
    /// [decline](crate::Declined::Checksums) the transfer. If a checksum differs, the blocks have
    /// been copied, and the destination is [incomplete](crate::TransferError::Incomplete). Layers
    /// of a [layer-by-layer](Self::layer_by_layer) transfer are done before checksums are known.
    ///
    /// ```
    /// # use terrane_transfer::{Checksums, Endpoint, Transfer, TransferManager};
    /// # fn example(manager: &TransferManager, host: &Endpoint, disk: &Endpoint)
    /// # -> Result<(), Box<dyn std::error::Error>> {
    /// let store = Transfer::new(host, disk).blocks(&[3, 7], &[1, 0]);
    /// let report = manager.submit(store.checksums(Checksums::Compute), ())?.wait().result?;
    /// let sums = report.checksums.unwrap_or_default(); // of blocks 1 and 0
    ///
    /// let load = Transfer::new(disk, host).blocks(&[1, 0], &[4, 5]);
    /// manager.submit(load.checksums(Checksums::Verify(sums.into())), ())?.wait().result?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn checksums(mut self, checksums: Checksums) -> Self {
        self.options.checksums = Some(checksums);
        self
    }

    /// Notifies the peer at the other end once all bytes have arrived, and not before. The message
    /// consists of any bytes, and appears among the peer's notifications. One of the ends must be a
    /// peer's. A transfer that fails sends no notification.
    pub fn notify(mut self, message: impl Into<Arc<[u8]>>) -> Self {
        self.options.notification = Some(message.into());
        self
    }

    /// Fails the transfer if it has not ended by `deadline`. Bytes may have been copied.
    ///
    /// Time spent waiting for predecessors counts. A waiting transfer fails only once they have
    /// ended, and a queued one when its turn in the engine comes. Engines check the clock between
    /// pieces of work of at most some milliseconds.
    ///
    /// An engine waits for a request that a device is already working on. It does not wait for a
    /// peer that does not answer. The transfer then ends, and its blocks stay claimed at both ends
    /// until the engine knows that nothing writes to them.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.options.deadline = Some(deadline);
        self
    }
}

/// Options of a transfer beyond the copy itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferOptions {
    /// The device work that the copy must run after.
    pub device_order: Option<DeviceOrder>,
    /// Minimum durability of written files when the job is finished. A file's [own
    /// setting](terrane_core::FileHandle::durability) applies if it is stricter.
    pub durability: Durability,
    /// The time by which the job must be finished, successfully or not.
    pub deadline: Option<Instant>,
    /// Whether further jobs write the same files for the same transfer, so that it is too early to
    /// make them durable. It is `false` for the last job, which may have no runs.
    pub more_follows: bool,
    /// Whether the job reports each layer. The plan is then ordered by layer.
    pub layer_by_layer: bool,
    /// The notification for the peer at the other end, sent once all bytes have arrived, and not
    /// before. Only an engine that serves peers receives it.
    pub notification: Option<Arc<[u8]>>,
    /// The use of the blocks' checksums. If it is set, the engine
    /// [computes](crate::CopyEngine::computes_checksums) them.
    pub checksums: Option<Checksums>,
}
