//! A buffer of a column: a region that is writable or read-only.

use std::fmt;

use terrane_core::{ByteCount, Location, Memory, Region, Span, StorageKind, ViewOutOfBounds};

use super::{ColumnError, Origin};

/// The bytes of one buffer of a column, kept alive.
///
/// Memory from another library is read-only, even if it is Terrane's own memory that was exported
/// before. Unsafe code can get its region, and promises not to write.
#[derive(Clone)]
pub struct ColumnBuffer {
    region: Region,
    is_read_only: bool,
    origin: Origin,
}

impl ColumnBuffer {
    /// A writable buffer of Terrane's memory.
    #[must_use]
    pub const fn writable(region: Region) -> Self {
        Self { region, is_read_only: false, origin: Origin::Owned }
    }

    /// A read-only buffer of Terrane's memory.
    #[must_use]
    pub const fn read_only(region: Region) -> Self {
        Self { region, is_read_only: true, origin: Origin::Owned }
    }

    /// A writable buffer of another library's memory.
    pub(crate) const fn foreign(region: Region, origin: Origin) -> Self {
        Self { region, is_read_only: false, origin }
    }

    /// The same buffer, read-only.
    pub(crate) fn as_read_only(&self) -> Self {
        Self { is_read_only: true, ..self.clone() }
    }

    /// The same buffer, writable.
    ///
    /// Use it for Terrane's memory that was exported and imported again. For structures of other
    /// libraries, other readers are unknown.
    ///
    /// # Safety
    ///
    /// The bytes may be written. Another library may still have the memory. So all other users of
    /// the bytes must synchronise with the users of the result, and of anything derived from it.
    #[must_use]
    pub unsafe fn into_writable(self) -> Self {
        Self { is_read_only: false, ..self }
    }

    /// The owner of the memory.
    #[must_use]
    pub const fn origin(&self) -> Origin {
        self.origin
    }

    /// Whether writing is forbidden.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The region, for reading and writing.
    ///
    /// # Errors
    ///
    /// [`ColumnError::ReadOnly`] if the buffer is read-only.
    pub fn region(&self) -> Result<&Region, ColumnError> {
        if self.is_read_only {
            return Err(ColumnError::ReadOnly { location: self.region.location() });
        }
        Ok(&self.region)
    }

    /// The region for reading, such as the source of a transfer.
    ///
    /// # Safety
    ///
    /// If the buffer [is read-only](Self::is_read_only), no code writes through the region or
    /// anything derived from it.
    #[must_use]
    pub const unsafe fn region_to_read(&self) -> &Region {
        &self.region
    }

    /// Its kind, location and length.
    #[must_use]
    pub fn span(&self) -> Span {
        self.region.span()
    }

    /// The kind of memory.
    #[must_use]
    pub fn kind(&self) -> StorageKind {
        self.region.kind()
    }

    /// The location of the first byte.
    #[must_use]
    pub fn location(&self) -> Location {
        self.region.location()
    }

    /// The number of bytes.
    #[must_use]
    pub fn length(&self) -> ByteCount {
        self.region.length()
    }

    /// The `length` bytes from `offset` on.
    ///
    /// # Errors
    ///
    /// [`ViewOutOfBounds`] if there are fewer.
    pub fn view(&self, offset: ByteCount, length: ByteCount) -> Result<Self, ViewOutOfBounds> {
        let region = self.region.view(offset, length)?;
        Ok(Self { region, ..*self })
    }

    /// Whether both are parts of the same memory.
    #[must_use]
    pub fn same_memory(&self, other: &Self) -> bool {
        self.region.same_memory(&other.region)
    }

    /// The region, for this crate, which writes through it only if the buffer is writable.
    pub(crate) const fn inner(&self) -> &Region {
        &self.region
    }
}

impl From<Region> for ColumnBuffer {
    fn from(region: Region) -> Self {
        Self::writable(region)
    }
}

impl fmt::Debug for ColumnBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ColumnBuffer")
            .field("span", &self.span())
            .field("is_read_only", &self.is_read_only)
            .field("origin", &self.origin)
            .finish()
    }
}
