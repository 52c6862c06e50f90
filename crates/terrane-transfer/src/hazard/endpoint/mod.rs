//! One end of a transfer: a layout, and the claims on its blocks.

mod of_groups;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use terrane_core::convert::to_usize;
use terrane_core::{Alignment, ForkedProcess, Location, Memory, Region, Span, StorageKind};
use terrane_layout::PhysicalLayout;
use terrane_storage::{IoBuffer, IoMemory};

use crate::error::TransferError;
use crate::hazard::address_claims::AddressClaim;
use crate::hazard::conflict::Access;
use crate::hazard::notify::notify;
use crate::hazard::orphaned_claims::OrphanedClaims;
use crate::hazard::table::incomplete::Area;
use crate::hazard::table::{
    ALL_TOKENS, BlockUse, Claim, HazardTable, LockedHazards, Written, no_conflicts,
};
use crate::hazard::ticket::Ticket;
use crate::side::Side;

/// A layout whose blocks can be transferred.
///
/// Cloning it costs a reference count. The layout and its memory live until the last clone and the
/// last transfer have dropped.
#[derive(Clone)]
pub struct Endpoint(Arc<EndpointInner>);

struct EndpointInner {
    /// The host memory of the extents. It keeps the regions, because clones may live longer.
    memory: SmallVec<[IoMemory; 1]>,
    /// Released before the layout frees the memory, which another endpoint may claim then.
    _bytes: Arc<OwnedBytes>,
    layout: PhysicalLayout,
    /// Shared by the groups of a set.
    hazards: HazardTable,
    /// The number of the group in its set.
    group: u32,
    number: u64,
    /// The start of each region.
    bases: Box<[Location]>,
    /// The bytes of the regions that blocks use, with adjacent spans joined: nearly always one
    /// span.
    extents: SmallVec<[Span; 1]>,
    alignment: Alignment,
}

/// The bytes of an endpoint, or of all groups of a set.
struct OwnedBytes {
    /// Dropped first: the claim is released before the memory may be freed.
    _claim: AddressClaim,
    /// Keeps the memory of a set until the last group has dropped.
    _regions: Box<[Region]>,
}

impl Endpoint {
    /// Creates an endpoint, which tracks the claims on a layout's blocks. It owns their bytes
    /// exclusively while it, a clone or a transfer of it lives.
    ///
    /// # Errors
    ///
    /// [`BytesInUse`] returns the layout if another endpoint of this process has some of its bytes.
    /// In a file, no 4 KiB page may be shared. Two such endpoints would each track only their own
    /// transfers, so one could read bytes that the other is writing.
    pub fn new(layout: PhysicalLayout) -> Result<Self, BytesInUse> {
        let extents = extents(&layout);
        match AddressClaim::claim(&extents) {
            Ok(claim) => Ok(Self::alone(claim, extents, layout)),
            Err(span) => Err(BytesInUse { layout: Box::new(layout), span }),
        }
    }

    /// Creates an endpoint of a layout whose bytes other endpoints may have too, for example
    /// another view of the same memory. A transfer that reads bytes which it also writes is still
    /// refused.
    ///
    /// # Safety
    ///
    /// While this endpoint, a clone or a transfer of it lives, the caller ensures two things:
    ///
    /// - No transfer of another endpoint writes bytes that a transfer of this endpoint reads or
    ///   writes at the same time, or the other way round.
    /// - No 4 KiB page of a file is accessed with direct I/O through one endpoint and with buffered
    ///   I/O through another.
    #[must_use]
    pub unsafe fn sharing(layout: PhysicalLayout) -> Self {
        let extents = extents(&layout);
        Self::alone(AddressClaim::none(), extents, layout)
    }

    fn alone(claim: AddressClaim, extents: SmallVec<[Span; 1]>, layout: PhysicalLayout) -> Self {
        let hazards = HazardTable::new(layout.geometry().num_blocks());
        // The layout keeps its memory itself.
        let bytes = Arc::new(OwnedBytes { _claim: claim, _regions: Box::default() });
        Self::build(bytes, extents, layout, hazards, 0)
    }

    fn build(
        bytes: Arc<OwnedBytes>,
        extents: SmallVec<[Span; 1]>,
        layout: PhysicalLayout,
        hazards: HazardTable,
        group: u32,
    ) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let bases = layout.regions().iter().map(Memory::location).collect();
        let alignment = layout.alignment_class();
        let regions: Arc<[Region]> = layout.regions().into();
        let memory = extents.iter().filter_map(|extent| host_memory(extent, &regions)).collect();
        // Relaxed: only uniqueness is needed.
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(Arc::new(EndpointInner {
            memory,
            _bytes: bytes,
            layout,
            hazards,
            group,
            number,
            bases,
            extents,
            alignment,
        }))
    }

    /// The layout.
    #[must_use]
    pub fn layout(&self) -> &PhysicalLayout {
        &self.0.layout
    }

    /// The kind of storage of the blocks.
    #[must_use]
    pub fn kind(&self) -> StorageKind {
        self.0.layout.storage_kind()
    }

    /// The location of a region; `None` if there is no such region.
    #[inline]
    #[must_use]
    pub fn base(&self, region: u32) -> Option<Location> {
        self.0.bases.get(to_usize(region.into())).copied()
    }

    /// The start of every region, by number.
    #[must_use]
    pub fn bases(&self) -> &[Location] {
        &self.0.bases
    }

    /// The largest power of two that divides the start and the end of every piece.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.0.alignment
    }

    /// The host memory of the blocks, for requests of I/O queues: nearly always one range. Queues
    /// register parts of it while the endpoint, a clone or a transfer of it lives. A clone of the
    /// value keeps the memory of all blocks, and its registration.
    #[must_use]
    pub fn io_memory(&self) -> &[IoMemory] {
        &self.0.memory
    }

    /// An identifier of the endpoint, by which engines cache facts about it.
    #[must_use]
    pub fn id(&self) -> EndpointId {
        EndpointId(self.0.number)
    }

    /// A weak reference, which keeps no memory alive.
    #[must_use]
    pub fn downgrade(&self) -> WeakEndpoint {
        WeakEndpoint(Arc::downgrade(&self.0))
    }

    /// The claims of orphaned transfers on the blocks.
    #[must_use]
    pub fn orphaned_claims(&self) -> OrphanedClaims {
        OrphanedClaims::new(self.0.hazards.clone())
    }

    /// Keeps transfers from writing these blocks, while the caller reads them directly.
    ///
    /// # Errors
    ///
    /// - [`TransferError::NoSuchBlock`];
    /// - [`TransferError::Conflict`] if a transfer in flight writes one of them;
    /// - [`TransferError::Incomplete`] if a failed transfer may have written one of them in part;
    /// - [`TransferError::Forked`].
    pub fn hold_for_read(&self, blocks: &[u32]) -> Result<Hold, TransferError> {
        self.hold(blocks, Access::Read)
    }

    /// Keeps transfers from reading or writing these blocks, while the caller writes them directly,
    /// for example with a kernel. When the hold drops, the blocks count as written.
    ///
    /// # Errors
    ///
    /// [`TransferError::NoSuchBlock`], [`TransferError::Conflict`] if a transfer in flight reads or
    /// writes one of them, and [`TransferError::Forked`].
    pub fn hold_for_write(&self, blocks: &[u32]) -> Result<Hold, TransferError> {
        self.hold(blocks, Access::Write)
    }

    fn hold(&self, blocks: &[u32], access: Access) -> Result<Hold, TransferError> {
        self.check_owner()?;
        self.check_blocks(blocks, access.side())?;
        let (layers, heads) = (0..self.0.layout.geometry().num_layers(), 0..self.num_heads());
        let area = Area { layers, heads, tokens: ALL_TOKENS };
        let wanted = BlockUse { access, blocks, group: self.group(), area };
        let mut hazards = self.0.hazards.lock();
        let mut checked = Ok(());
        if !hazards.count(&wanted) {
            // The search skips blocks that are not in use, so it must not see this claim.
            hazards.uncount(&wanted);
            checked = no_conflicts(hazards.conflicts(&wanted, &|_| false));
            let _ = hazards.count(&wanted);
        }
        if access == Access::Read {
            checked = checked.and_then(|()| hazards.check_complete(&wanted));
        }
        if checked.is_err() {
            hazards.uncount(&wanted);
        }
        checked?;
        let ticket = Ticket::new([]);
        let claim = hazards.claim(&ticket, &wanted);
        drop(hazards);
        let end = EndOfHold { ticket, access, is_incomplete: false };
        Ok(Hold { claim, _endpoint: self.clone(), end })
    }

    /// The heads of a token, as hazards count them; 1 if they are not stated.
    pub(crate) fn num_heads(&self) -> u32 {
        num_heads(&self.0.layout)
    }

    /// The token numbers that hazards record for some tokens. If these include the last token of a
    /// block, all higher numbers are added, so that writing every token completes the block.
    #[cold]
    pub(crate) fn numbers_of_tokens(&self, tokens: Range<u32>) -> Range<u32> {
        let sections = self.0.layout.geometry().sections().iter();
        let has_last = sections.clone().all(|section| section.shape().tokens <= tokens.end);
        if has_last { tokens.start..ALL_TOKENS.end } else { tokens }
    }

    /// The number of the group among those that share its hazards.
    pub(crate) fn group(&self) -> u32 {
        self.0.group
    }

    /// The claims in flight on the blocks.
    pub(crate) fn hazards(&self) -> &HazardTable {
        &self.0.hazards
    }

    /// Fails in a process that was forked from the endpoint's process.
    pub(crate) fn check_owner(&self) -> Result<(), ForkedProcess> {
        self.0.hazards.check_owner()
    }

    pub(crate) fn check_blocks(&self, blocks: &[u32], side: Side) -> Result<(), TransferError> {
        let num_blocks = self.0.layout.geometry().num_blocks();
        // Without a branch for each element, the compiler vectorises the comparison.
        if !blocks.iter().fold(false, |found, &block| found | (block >= num_blocks)) {
            return Ok(());
        }
        match blocks.iter().find(|&&block| block >= num_blocks) {
            Some(&block) => Err(TransferError::NoSuchBlock { side, block, num_blocks }),
            None => Ok(()),
        }
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether both own some of the same bytes.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.0.extents.iter().any(|a| other.0.extents.iter().any(|b| a.overlaps(b)))
    }

    /// Locks the hazards of both ends. If they share a table, only the first lock exists.
    pub(crate) fn lock_both<'a>(
        source: &'a Self,
        destination: &'a Self,
    ) -> (LockedHazards<'a>, Option<LockedHazards<'a>>) {
        HazardTable::lock_both(&source.0.hazards, &destination.0.hazards)
    }
}

terrane_core::debug_fields!(Endpoint, |this| (this.0.layout));

/// The number of an endpoint, unique within the process and never reused. Clones share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EndpointId(u64);

/// A weak reference to an endpoint.
#[derive(Clone)]
pub struct WeakEndpoint(Weak<EndpointInner>);

impl WeakEndpoint {
    /// Returns the endpoint, unless it, its clones and its transfers have all dropped.
    #[must_use]
    pub fn upgrade(&self) -> Option<Endpoint> {
        self.0.upgrade().map(Endpoint)
    }

    /// Whether the endpoint, its clones and its transfers have all dropped.
    #[must_use]
    pub fn has_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

impl fmt::Debug for WeakEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakEndpoint").field("has_gone", &self.has_gone()).finish()
    }
}

/// The error for a layout whose bytes another endpoint owns: the layout, and the span in use.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} at {} of {} memory are in use by another endpoint; transfer through that one, or drop \
     it first; create both with Endpoint::of_groups, or use Endpoint::sharing and separate their users",
    .span.length, .span.location, .span.kind
)]
pub struct BytesInUse {
    /// The layout, as it was given.
    pub layout: Box<PhysicalLayout>,
    /// The span that contains bytes in use.
    pub span: Span,
}

/// Keeps transfers from using some blocks, until it drops.
///
/// It keeps the endpoint alive, so no other endpoint can be created over its bytes meanwhile.
///
/// Its drop starts the transfers that run after it. If a write hold drops while its thread unwinds
/// from a panic, the blocks are [incomplete](TransferError::Incomplete). Those transfers then fail,
/// like those after a failed transfer.
#[must_use = "dropping the hold lets transfers use the blocks"]
pub struct Hold {
    // Fields drop in this order: the blocks are free before waiting transfers are notified.
    claim: Claim,
    _endpoint: Endpoint,
    end: EndOfHold,
}

impl Hold {
    /// A ticket of the hold, to run transfers after it has dropped.
    #[must_use]
    pub fn ticket(&self) -> Ticket {
        self.end.ticket.clone()
    }

    /// Ends a hold for writing whose holder did not write these blocks completely. They are then
    /// [incomplete](TransferError::Incomplete), and all other blocks of the hold count as written.
    /// Transfers that need the success of the hold fail. Ends any other hold as a drop does.
    pub fn end_incomplete(mut self, blocks: &[u32]) {
        if self.end.access == Access::Write && !blocks.is_empty() {
            self.claim.has_written(Written::AllExcept(blocks.into()));
            self.end.is_incomplete = true;
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.end.succeeds() {
            self.claim.has_written(Written::All);
        }
    }
}

struct EndOfHold {
    ticket: Ticket,
    access: Access,
    is_incomplete: bool,
}

impl EndOfHold {
    /// Whether the hold succeeds if it ends now.
    fn succeeds(&self) -> bool {
        !self.is_incomplete && (self.access == Access::Read || !std::thread::panicking())
    }
}

impl Drop for EndOfHold {
    fn drop(&mut self) {
        let succeeded = self.succeeds();
        notify(self.ticket.end(succeeded), self.ticket.id(), succeeded);
    }
}

terrane_core::debug_fields!(Hold, |this| (this.end.ticket));

/// The memory of an extent of these regions, if the host addresses it.
fn host_memory(extent: &Span, regions: &Arc<[Region]>) -> Option<IoMemory> {
    let address = extent.location.as_host().filter(|_| extent.kind.is_host())?;
    let range = IoBuffer { address, length: extent.length };
    // SAFETY: the extent is memory of the regions. `Memory` requires them to keep their pages until
    // they drop.
    Some(unsafe { IoMemory::owning(range, Arc::clone(regions)) })
}

/// The number of heads of a token, as hazards count them.
fn num_heads(layout: &PhysicalLayout) -> u32 {
    let sections = layout.geometry().sections().iter();
    sections.filter_map(|section| section.shape().heads).max().unwrap_or(1)
}

/// The bytes of a layout's regions that its blocks use. Others may use the rest of an adopted
/// region.
fn extents(layout: &PhysicalLayout) -> SmallVec<[Span; 1]> {
    let geometry = layout.geometry();
    join(
        (0_u32..).zip(layout.regions()).map(|(number, region)| Span {
            length: geometry.region_bytes(number),
            ..Span::of(region)
        }),
    )
}

/// Joins adjacent spans, such as the regions of one allocation.
fn join(spans: impl Iterator<Item = Span>) -> SmallVec<[Span; 1]> {
    let mut joined: SmallVec<[Span; 1]> = SmallVec::new();
    for span in spans {
        let follows = |last: &Span| last.location.checked_add(last.length) == Some(span.location);
        match joined.last_mut().filter(|last| follows(last)) {
            Some(last) => match last.length.checked_add(span.length) {
                Ok(length) => last.length = length,
                Err(_) => joined.push(span),
            },
            None => joined.push(span),
        }
    }
    joined
}
