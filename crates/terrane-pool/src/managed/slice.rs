//! Typed managed allocations and views of them.

use std::fmt;
use std::marker::PhantomData;
use std::slice;

use bytemuck::Pod;
use terrane_core::{Alignment, ByteCount, Location, Memory};

use super::block::TrackedBlock;
use super::error::{CastFailed, ManagedError};

/// A managed allocation of `len` elements of plain data, wherever it lies.
pub struct TrackedSlice<T, M: Memory> {
    block: TrackedBlock<M>,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod, M: Memory> TrackedSlice<T, M> {
    /// The manager has asked for the bytes and the alignment that `len` elements need; that they
    /// were granted is checked again here.
    pub(super) fn new(block: TrackedBlock<M>, len: usize) -> Result<Self, ManagedError> {
        let length = ByteCount::from_usize(size_of::<T>())
            .checked_mul("elements", ByteCount::from_usize(len).get())?;
        view_of::<T>(block.location(), length)?;
        if block.length() < length {
            return Err(ManagedError::OutOfBounds {
                handle: block.handle(),
                tag: block.tag(),
                offset: ByteCount::ZERO,
                length,
                block_length: block.length(),
            });
        }
        Ok(Self { block, len, element: PhantomData })
    }

    /// How many elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The size of the elements in bytes.
    #[must_use]
    pub fn bytes(&self) -> ByteCount {
        ByteCount::from_usize(self.len * size_of::<T>())
    }

    /// Where the first element lies.
    #[must_use]
    pub fn location(&self) -> Location {
        self.block.location()
    }

    /// The allocation.
    #[must_use]
    pub fn block(&self) -> &TrackedBlock<M> {
        &self.block
    }

    /// The allocation, without the type.
    #[must_use]
    pub fn into_block(self) -> TrackedBlock<M> {
        self.block
    }

    /// The elements as their bytes.
    #[must_use]
    pub fn as_bytes(&self) -> TypedView<'_, u8> {
        TypedView { location: self.location(), len: self.bytes().to_usize(), slice: PhantomData }
    }

    /// The same bytes as elements of another type.
    ///
    /// # Errors
    ///
    /// [`ManagedError::PartialElement`] if they are no whole number of such elements, and
    /// [`ManagedError::Misaligned`] if the address is not aligned for them.
    pub fn view_as<U: Pod>(&self) -> Result<TypedView<'_, U>, ManagedError> {
        view_of(self.location(), self.bytes())
    }

    /// The allocation as one of bytes.
    #[must_use]
    pub fn into_bytes(self) -> TrackedSlice<u8, M> {
        let len = self.len * size_of::<T>();
        TrackedSlice { block: self.block, len, element: PhantomData }
    }

    /// The allocation as one of elements of another type, without a copy.
    ///
    /// # Errors
    ///
    /// As for [`view_as`](Self::view_as), with the slice as it was.
    #[expect(clippy::result_large_err, reason = "the error is the slice itself, given back")]
    pub fn try_cast<U: Pod>(self) -> Result<TrackedSlice<U, M>, CastFailed<Self>> {
        match self.view_as::<U>() {
            Ok(TypedView { len, .. }) => {
                Ok(TrackedSlice { block: self.block, len, element: PhantomData })
            }
            Err(cause) => Err(CastFailed { slice: self, cause }),
        }
    }

    /// The elements, where the processor can address them.
    ///
    /// # Safety
    ///
    /// For as long as the slice is borrowed, nothing else accesses the elements: no stream's work
    /// that uses them is in flight, and nobody uses their location.
    ///
    /// # Errors
    ///
    /// [`ManagedError::NotHost`] for memory that the processor cannot address.
    pub unsafe fn host_slice(&mut self) -> Result<&mut [T], ManagedError> {
        let kind = self.block.kind();
        let Location::Host(address) = self.location() else {
            return Err(ManagedError::NotHost { kind });
        };
        // SAFETY: `new` checked the size and the alignment of the elements, which lie in memory
        // that is valid and initialised for as long as the block; every pattern of bits is a `T`;
        // and the caller promises that nobody else accesses them.
        Ok(unsafe { slice::from_raw_parts_mut(address.as_ptr().cast(), self.len) })
    }
}

impl<T, M: Memory> fmt::Debug for TrackedSlice<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackedSlice").field("len", &self.len).field("block", &self.block).finish()
    }
}

/// Where `len` elements of a type lie in a block that it borrows: their size and alignment were
/// checked.
#[derive(Clone, Copy, Debug)]
pub struct TypedView<'slice, T> {
    location: Location,
    len: usize,
    slice: PhantomData<&'slice [T]>,
}

impl<T> TypedView<'_, T> {
    /// Where the first element lies.
    #[must_use]
    pub fn location(&self) -> Location {
        self.location
    }

    /// How many elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// `bytes` bytes at `location` as elements.
fn view_of<'slice, T: Pod>(
    location: Location,
    bytes: ByteCount,
) -> Result<TypedView<'slice, T>, ManagedError> {
    let (size, alignment) = (size_of::<T>(), align_of::<T>());
    let length = bytes.to_usize();
    let len = match (length.checked_div(size), length.checked_rem(size)) {
        (Some(len), Some(0)) => len,
        // No bytes are no elements, even of a type that has no size.
        _ if length == 0 => 0,
        _ => return Err(ManagedError::PartialElement { bytes, element: size }),
    };
    let needed = Alignment::of(ByteCount::from_usize(alignment).get());
    let available = location.alignment();
    if available < needed {
        return Err(ManagedError::Misaligned { location, available, needed });
    }
    Ok(TypedView { location, len, slice: PhantomData })
}
