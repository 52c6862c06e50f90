//! Typed managed allocations and views of them.

use std::fmt;
use std::marker::PhantomData;
use std::slice;

use bytemuck::Pod;
use terrane_core::convert::to_u64;
use terrane_core::{Alignment, ByteCount, Location, Memory};

use super::block::TrackedBlock;
use super::error::{CastFailed, ManagedError};

/// A managed allocation of `len` elements of plain data, in any kind of memory.
pub struct TrackedSlice<T, M: Memory> {
    block: TrackedBlock<M>,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod, M: Memory> TrackedSlice<T, M> {
    /// The manager has requested the bytes and the alignment that `len` elements need. This checks
    /// that they were granted.
    pub(super) fn new(block: TrackedBlock<M>, len: usize) -> Result<Self, ManagedError> {
        let length = ByteCount::from_usize(size_of::<T>()).checked_mul("elements", to_u64(len))?;
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

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the size of the elements in bytes.
    #[must_use]
    pub fn bytes(&self) -> ByteCount {
        ByteCount::from_usize(self.len * size_of::<T>())
    }

    /// Returns the location of the first element.
    #[must_use]
    pub fn location(&self) -> Location {
        self.block.location()
    }

    /// Returns the allocation.
    #[must_use]
    pub fn block(&self) -> &TrackedBlock<M> {
        &self.block
    }

    /// Converts into the allocation, without the type.
    #[must_use]
    pub fn into_block(self) -> TrackedBlock<M> {
        self.block
    }

    /// Views the elements as bytes.
    #[must_use]
    pub fn as_bytes(&self) -> TypedView<'_, u8> {
        TypedView { location: self.location(), len: self.bytes().to_usize(), slice: PhantomData }
    }

    /// Views the same bytes as elements of another type.
    ///
    /// # Errors
    ///
    /// [`ManagedError::PartialElement`] if the bytes are not a whole number of such elements, and
    /// [`ManagedError::Misaligned`] if the address is not aligned for them.
    pub fn view_as<U: Pod>(&self) -> Result<TypedView<'_, U>, ManagedError> {
        view_of(self.location(), self.bytes())
    }

    /// Converts into an allocation of bytes.
    #[must_use]
    pub fn into_bytes(self) -> TrackedSlice<u8, M> {
        let len = self.len * size_of::<T>();
        TrackedSlice { block: self.block, len, element: PhantomData }
    }

    /// Converts into an allocation of elements of another type, without a copy.
    ///
    /// # Errors
    ///
    /// As for [`view_as`](Self::view_as), with the unchanged slice.
    #[expect(clippy::result_large_err, reason = "the error contains the slice")]
    pub fn try_cast<U: Pod>(self) -> Result<TrackedSlice<U, M>, CastFailed<Self>> {
        match self.view_as::<U>() {
            Ok(TypedView { len, .. }) => {
                Ok(TrackedSlice { block: self.block, len, element: PhantomData })
            }
            Err(cause) => Err(CastFailed { slice: self, cause }),
        }
    }

    /// Returns the elements, if the processor can address them.
    ///
    /// # Safety
    ///
    /// While the slice is borrowed, nothing else may access the elements. No work of a stream that
    /// uses them may be in flight, and no code may access them through their location.
    ///
    /// # Errors
    ///
    /// [`ManagedError::NotHost`] for memory that the processor cannot address.
    pub unsafe fn host_slice(&mut self) -> Result<&mut [T], ManagedError> {
        let kind = self.block.kind();
        let address = self.location().as_host().ok_or(ManagedError::NotHost { kind })?;
        // SAFETY: `new` checked the size and the alignment of the elements. Their memory is valid
        // and initialised while the block lives. Every bit pattern is a valid `T`. The caller
        // promises that nothing else accesses them.
        Ok(unsafe { slice::from_raw_parts_mut(address.as_ptr().cast(), self.len) })
    }
}

impl<T, M: Memory> fmt::Debug for TrackedSlice<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrackedSlice").field("len", &self.len).field("block", &self.block).finish()
    }
}

/// The location of `len` elements of a type in a borrowed block. Their size and alignment were
/// checked.
#[derive(Clone, Copy, Debug)]
pub struct TypedView<'slice, T> {
    location: Location,
    len: usize,
    slice: PhantomData<&'slice [T]>,
}

impl<T> TypedView<'_, T> {
    /// Returns the location of the first element.
    #[must_use]
    pub fn location(&self) -> Location {
        self.location
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Divides `bytes` bytes at `location` into elements.
fn view_of<'slice, T: Pod>(
    location: Location,
    bytes: ByteCount,
) -> Result<TypedView<'slice, T>, ManagedError> {
    let (size, alignment) = (size_of::<T>(), align_of::<T>());
    let length = bytes.to_usize();
    let len = match (length.checked_div(size), length.checked_rem(size)) {
        (Some(len), Some(0)) => len,
        // Zero bytes are zero elements, even of a type of size zero.
        _ if length == 0 => 0,
        _ => return Err(ManagedError::PartialElement { bytes, element: size }),
    };
    let needed = Alignment::of(to_u64(alignment));
    let available = location.alignment();
    if available < needed {
        return Err(ManagedError::Misaligned { location, available, needed });
    }
    Ok(TypedView { location, len, slice: PhantomData })
}
