//! A block in use: an owned handle that goes back to its pool when dropped.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::SmallVec;
use terrane_core::{
    ByteCount, CapabilityReport, DeviceAddress, Location, Memory, RegistrationRecord, StorageKind,
};

use crate::grant::{Grant, GrantRef, Use};
use crate::record::Record;
use crate::stock::Stock;
use crate::{Access, PoolError, StreamId};

/// A block of a [`Pool`](crate::Pool), for as long as it is in use.
///
/// Dropping it gives the block back, from any thread, to the pool that it came from, whether
/// that pool is still there or not. It is neither `Copy` nor `Clone`: releasing a block twice, or
/// to another pool, does not compile.
///
/// Its [length](Memory::length) is what was granted, at least what was
/// [asked](Self::asked) for.
pub struct PoolBlock<M: Memory> {
    record: ManuallyDrop<Box<Record<M>>>,
    grant: GrantRef<M>,
}

impl<M: Memory> PoolBlock<M> {
    /// The block of a record, with the grant of its class. No stream uses it.
    #[inline]
    pub(crate) fn new(record: Box<Record<M>>, grant: GrantRef<M>) -> Self {
        Self { record: ManuallyDrop::new(record), grant }
    }

    #[inline]
    fn grant(&self) -> Grant<M> {
        // SAFETY: the record keeps its stock alive.
        unsafe { self.grant.get() }
    }

    /// Makes `stream` the one on which the block is released.
    pub(crate) fn at_home_on(mut self, stream: StreamId) -> Self {
        self.record.order.home = Some(stream);
        self.set_apart();
        self
    }

    /// Notes that streams use the block: the record says which.
    fn set_apart(&mut self) {
        self.record.asked = self.asked().get();
        let Grant { class, tag, .. } = self.grant();
        self.grant = self.record.stock.grant(class, tag, Use::Apart);
    }

    /// How many bytes were asked for.
    #[must_use]
    pub fn asked(&self) -> ByteCount {
        let grant = self.grant();
        ByteCount::new(if grant.is == Use::Whole { grant.weight } else { self.record.asked })
    }

    /// How many bytes may be used: the size of the block.
    #[must_use]
    pub fn granted(&self) -> ByteCount {
        ByteCount::new(self.record.granted)
    }

    /// The stream on which the block was acquired, and is released.
    #[must_use]
    pub fn stream(&self) -> Option<StreamId> {
        self.record.order.home
    }

    /// Says that work has been, or is about to be, submitted to `stream` that uses the block.
    ///
    /// The block is not reused until that stream has come to the point where the block was
    /// dropped. Of several uses on one stream only the strongest is kept. Uses on the block's own
    /// stream need not be said.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoFences`] if the pool knows no streams.
    pub fn record_use(&mut self, stream: StreamId, access: Access) -> Result<(), PoolError> {
        if !self.record.stock.knows_streams() {
            return Err(PoolError::NoFences);
        }
        self.record.order.record(stream, access);
        self.set_apart();
        Ok(())
    }

    /// What streams other than the block's own use it, and how.
    #[must_use]
    pub fn uses(&self) -> &[(StreamId, Access)] {
        self.record.order.uses()
    }

    /// Gives the block back on `stream`: there it can be reused at once, elsewhere only after
    /// that stream, and every other that uses it, has come to this point.
    ///
    /// # Errors
    ///
    /// [`PoolError::NoFences`], and the block as it was, if the pool knows no streams.
    #[expect(clippy::result_large_err, reason = "a block that is refused comes back")]
    pub fn release_on(mut self, stream: StreamId) -> Result<(), (Self, PoolError)> {
        if !self.record.stock.knows_streams() {
            return Err((self, PoolError::NoFences));
        }
        if let Some(before) = self.record.order.home.replace(stream)
            && before != stream
        {
            self.record.order.record(before, Access::Write);
        }
        self.record.order.forget(stream);
        self.set_apart();
        Ok(())
    }

    /// The first `count` elements of the block as `T`s: proof that they fit what was asked for
    /// and are aligned, and where they are.
    ///
    /// # Errors
    ///
    /// [`PoolError::ViewDoesNotFit`] if they do not or are not.
    pub fn typed<T>(&self, count: usize) -> Result<TypedSpan<'_, T>, PoolError> {
        let location = self.location();
        let (element, alignment) = (size_of::<T>(), align_of::<T>());
        let bytes = count.checked_mul(element).map(ByteCount::from_usize);
        let fits = bytes.is_some_and(|bytes| bytes <= self.asked());
        if !fits || location.alignment().get() < ByteCount::from_usize(alignment).get() {
            return Err(PoolError::ViewDoesNotFit {
                count,
                element,
                alignment,
                asked: self.asked(),
                available: location.alignment(),
            });
        }
        Ok(TypedSpan { location, count, block: PhantomData })
    }
}

impl<M: Memory> Drop for PoolBlock<M> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the record is not touched again, as the handle is being dropped.
        let record = unsafe { ManuallyDrop::take(&mut self.record) };
        Stock::give_back(record, self.grant);
    }
}

// SAFETY: the record owns its memory, or a part of a slab that it keeps alive; neither moves, and
// the record answers always the same. A block is handed out to one owner at a time.
unsafe impl<M: Memory> Memory for PoolBlock<M> {
    fn kind(&self) -> StorageKind {
        self.record.kind
    }

    #[inline]
    fn location(&self) -> Location {
        self.record.location
    }

    #[inline]
    fn length(&self) -> ByteCount {
        self.granted()
    }

    fn device_alias(&self) -> Option<DeviceAddress> {
        self.record.memory().device_alias()?.checked_add(self.record.offset())
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        let within = self.record.offset().checked_add(offset).ok()?;
        let left = self.granted().checked_sub(offset).unwrap_or(ByteCount::ZERO);
        Some(self.record.memory().copyable_from(within)?.min(left))
    }

    fn capabilities(&self) -> CapabilityReport {
        self.record.memory().capabilities()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        self.record.memory().visit_registrations(visit);
    }
}

impl<M: Memory> fmt::Debug for PoolBlock<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolBlock")
            .field("asked", &self.asked())
            .field("granted", &self.granted())
            .field("location", &self.location())
            .field("stream", &self.stream())
            .finish_non_exhaustive()
    }
}

/// Where `count` elements of a type lie in a block, whose size and alignment were checked.
///
/// It borrows the block, so it cannot outlive it.
#[derive(Debug)]
pub struct TypedSpan<'block, T> {
    location: Location,
    count: usize,
    block: PhantomData<(&'block (), NonNull<T>)>,
}

impl<T> TypedSpan<'_, T> {
    /// How many elements.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Where the first one lies: a multiple of its alignment.
    #[must_use]
    pub fn location(&self) -> Location {
        self.location
    }

    /// The first element in the host's memory; `None` elsewhere. Reading or writing through it
    /// is the caller's risk: the bytes are initialised, and a device may be using them.
    #[must_use]
    pub fn host_pointer(&self) -> Option<NonNull<T>> {
        NonNull::new(self.location.as_host()?.as_ptr().cast())
    }
}

/// What streams a block has to wait for before it is free for all.
#[derive(Debug, Default)]
pub(crate) struct StreamOrder {
    pub(crate) home: Option<StreamId>,
    /// In a place of their own, as few blocks have any: a record's first line stays short.
    uses: Option<Box<Uses>>,
}

type Uses = SmallVec<[(StreamId, Access); 4]>;

impl StreamOrder {
    /// Whether no stream uses the block.
    #[inline]
    pub(crate) fn is_free(&self) -> bool {
        self.home.is_none() && self.uses.is_none()
    }

    /// The stream that the block was released on, if no other uses it.
    #[inline]
    pub(crate) fn only_home(&self) -> Option<StreamId> {
        self.home.filter(|_| self.uses.is_none())
    }

    fn record(&mut self, stream: StreamId, access: Access) {
        if self.home == Some(stream) {
            return;
        }
        let uses = self.uses.get_or_insert_default();
        match uses.iter_mut().find(|(known, _)| *known == stream) {
            Some((_, strongest)) => *strongest = access.max(*strongest),
            None => uses.push((stream, access)),
        }
    }

    /// Forgets the uses of a stream.
    fn forget(&mut self, stream: StreamId) {
        if let Some(uses) = &mut self.uses {
            uses.retain(|&mut (other, _)| other != stream);
            if uses.is_empty() {
                self.uses = None;
            }
        }
    }

    /// What streams other than the home use the block, and how.
    fn uses(&self) -> &[(StreamId, Access)] {
        self.uses.as_ref().map_or(&[], |uses| uses.as_slice())
    }

    /// Every stream of the order, once.
    pub(crate) fn streams(&self) -> impl Iterator<Item = StreamId> + '_ {
        self.home.into_iter().chain(self.uses().iter().map(|&(stream, _)| stream))
    }
}

/// Keeps the documentation's promise that blocks go to other threads.
const _: fn() = || {
    fn shared<T: Send + Sync>() {}
    shared::<PoolBlock<Arc<dyn Memory>>>();
};
