//! What is asked for: which blocks go from where to where, and under which terms.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::job::Terms;
use crate::{DeviceOrder, Durability, Endpoint, Ticket};

/// A transfer of blocks from one layout to another of equal shape.
///
/// Shapes are equal if sections have equal names, layers, tokens and rows. All strides may differ:
/// rows are copied to where the destination has them. If both layouts state their heads, these only
/// need equal lengths: [some heads](Self::heads) of one layout can go to another one that has more.
///
/// Nothing is checked, and nothing happens, before it is submitted.
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
    pub(crate) heads: Option<[Range<u32>; 2]>,
    /// `None` for all tokens.
    pub(crate) tokens: Option<[Range<u32>; 2]>,
    /// The first layer at the destination; `None` for that of the source. With one, the ends may
    /// differ in their number of layers.
    pub(crate) landing: Option<u32>,
    pub(crate) after: Vec<Predecessor>,
    pub(crate) allow_incomplete: bool,
    pub(crate) terms: Terms,
}

/// What a transfer runs after.
#[derive(Clone, Debug)]
pub(crate) struct Predecessor {
    pub(crate) ticket: Ticket,
    /// Whether the transfer is not started if this one fails.
    pub(crate) has_to_succeed: bool,
}

impl Transfer {
    /// A transfer of no blocks yet, of all layers.
    pub fn new(source: &Endpoint, destination: &Endpoint) -> Self {
        Self {
            source: source.clone(),
            destination: destination.clone(),
            source_blocks: Vec::new(),
            destination_blocks: Vec::new(),
            layers: None,
            heads: None,
            tokens: None,
            landing: None,
            after: Vec::new(),
            allow_incomplete: false,
            terms: Terms::default(),
        }
    }

    /// Which blocks go where: the n-th of `source` to the n-th of `destination`. Added to those
    /// named before. The order of the pairs does not matter; no destination may be named twice.
    pub fn blocks(mut self, source: &[u32], destination: &[u32]) -> Self {
        self.source_blocks.extend_from_slice(source);
        self.destination_blocks.extend_from_slice(destination);
        self
    }

    /// Only these layers of the blocks.
    pub fn layers(self, layers: Range<u32>) -> Self {
        Self { layers: Some(layers), ..self }
    }

    /// Only these heads of the source's blocks, to those of the destination's, as many. Both
    /// layouts [state](terrane_layout::LayoutConfigBuilder::num_heads) their heads, and may differ
    /// in how many they have: a tensor-parallel rank that holds 2 of 8 reads and writes its share
    /// of a page that holds all, beside the other ranks.
    pub fn heads(self, source: Range<u32>, destination: Range<u32>) -> Self {
        Self { heads: Some([source, destination]), ..self }
    }

    /// Only these tokens of the source's blocks, to those of the destination's, as many.
    ///
    /// For hazards the whole blocks count as read and as written.
    pub fn tokens(self, source: Range<u32>, destination: Range<u32>) -> Self {
        Self { tokens: Some([source, destination]), ..self }
    }

    /// Starts only when the ticket's transfer has ended well. If that one fails, this one fails
    /// without having started. May be called several times.
    ///
    /// Blocks that the other one uses do not conflict then.
    ///
    /// This is for a transfer that reads what the other one writes. A transfer that only waits for
    /// blocks to be free runs [after the end](Self::after_end) of the other one.
    pub fn after(mut self, ticket: &Ticket) -> Self {
        self.after.push(Predecessor { ticket: ticket.clone(), has_to_succeed: true });
        self
    }

    /// Starts only when the ticket's transfer has ended, whether it has succeeded or failed. May be
    /// called several times.
    ///
    /// Blocks that the other one uses do not conflict then. If that one fails half-way, its
    /// destination is [incomplete](crate::TransferError::Incomplete): this transfer may write it, and reads it
    /// only if it [may](Self::allow_incomplete).
    pub fn after_end(mut self, ticket: &Ticket) -> Self {
        self.after.push(Predecessor { ticket: ticket.clone(), has_to_succeed: false });
        self
    }

    /// Reads source blocks also if a failed transfer may have written them in part.
    ///
    /// The destination then counts as written, whatever the bytes are. Otherwise such a transfer is
    /// refused with [`TransferError::Incomplete`](crate::TransferError::Incomplete).
    pub fn allow_incomplete(mut self) -> Self {
        self.allow_incomplete = true;
        self
    }

    /// What the copy runs after on the device, as of the submission, also of a transfer that runs
    /// [after](Self::after) others. It has to be said of a transfer that a device takes part in, and of
    /// no other.
    pub fn device_order(mut self, order: DeviceOrder) -> Self {
        self.terms.device_order = Some(order);
        self
    }

    /// What is true of written files when the transfer has ended well, where that is more than
    /// the files state themselves. Of a transfer that writes no file only [`Durability::None`] can
    /// be asked.
    pub fn durability(mut self, durability: Durability) -> Self {
        self.terms.durability = durability;
        self
    }

    /// Has the transfer say what becomes of each layer ([`Completion::layers`]), so that layer 0
    /// can be used while layer 1 travels. It is then copied in the order of the layers.
    ///
    /// Costs some bandwidth where layers would be copied together.
    ///
    /// [`Completion::layers`]: crate::Completion::layers
    pub fn layer_wise(mut self) -> Self {
        self.terms.layer_wise = true;
        self
    }

    /// Tells the peer at the other end, once all bytes have arrived and no sooner: it finds the
    /// message among its notifications. Any bytes will do. One of the ends has to be a peer's; if the
    /// transfer fails, nothing is told.
    pub fn notify(mut self, message: impl Into<Arc<[u8]>>) -> Self {
        self.terms.notification = Some(message.into());
        self
    }

    /// Ends the transfer with an error if it has not ended by then. Bytes may have been copied.
    ///
    /// Time spent waiting for predecessors counts, though a transfer that waits is ended only
    /// once they have ended, and one that is queued behind others in its engine when its turn
    /// comes. Of what they have begun, engines look at the clock between pieces of work of some
    /// milliseconds at most; a request that a device is already working on is waited for. One that a
    /// peer does not answer is not: the transfer ends, and its blocks stay claimed at both ends until
    /// the engine knows that nothing writes to them any more.
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.terms.deadline = Some(deadline);
        self
    }
}
