//! A buffer of a column: a region, and whether it may be written.

use std::fmt;

use terrane_core::{ByteCount, Location, Memory, Region, Span, StorageKind, ViewOutOfBounds};

use super::{ColumnError, Origin};

/// The bytes of one buffer of a column, kept alive.
///
/// What came from another library is for reading only, also where it is memory of ours that the
/// library had: its region can be had by unsafe code, which promises to write nothing.
#[derive(Clone)]
pub struct ColumnBuffer {
    region: Region,
    is_read_only: bool,
    origin: Origin,
}

impl ColumnBuffer {
    /// A buffer of ours that may be written.
    #[must_use]
    pub const fn writable(region: Region) -> Self {
        Self { region, is_read_only: false, origin: Origin::Owned }
    }

    /// A buffer of ours that may be read only.
    #[must_use]
    pub const fn read_only(region: Region) -> Self {
        Self { region, is_read_only: true, origin: Origin::Owned }
    }

    /// A buffer of another library's that may be written.
    pub(crate) const fn foreign(region: Region, origin: Origin) -> Self {
        Self { region, is_read_only: false, origin }
    }

    /// The same buffer, to be read only.
    pub(crate) fn as_read_only(&self) -> Self {
        Self { is_read_only: true, ..self.clone() }
    }

    /// The same buffer, to be written.
    ///
    /// This is for memory of ours that has come back: of another library's structures nothing tells
    /// who else still reads them.
    ///
    /// # Safety
    ///
    /// The bytes may be written, and for as long as the answer, or what is made of it, lives,
    /// every other user of them (another library that has the memory as well, for example)
    /// synchronises with its users.
    #[must_use]
    pub unsafe fn into_writable(self) -> Self {
        Self { is_read_only: false, ..self }
    }

    /// Whose memory it is.
    #[must_use]
    pub const fn origin(&self) -> Origin {
        self.origin
    }

    /// Whether no code may write it.
    #[must_use]
    pub const fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// The region, to read and write.
    ///
    /// # Errors
    ///
    /// [`ColumnError::ReadOnly`] if it is for reading only.
    pub fn region(&self) -> Result<&Region, ColumnError> {
        if self.is_read_only {
            return Err(ColumnError::ReadOnly { location: self.region.location() });
        }
        Ok(&self.region)
    }

    /// The region, to read: the source of a transfer, never its destination.
    ///
    /// # Safety
    ///
    /// If the buffer [is for reading only](Self::is_read_only), no code writes through the region or
    /// what is made of it.
    #[must_use]
    pub const unsafe fn region_to_read(&self) -> &Region {
        &self.region
    }

    /// Kind, place and length.
    #[must_use]
    pub fn span(&self) -> Span {
        self.region.span()
    }

    /// The kind of memory.
    #[must_use]
    pub fn kind(&self) -> StorageKind {
        self.region.kind()
    }

    /// Where the first byte lies.
    #[must_use]
    pub fn location(&self) -> Location {
        self.region.location()
    }

    /// How many bytes there are.
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

    /// Whether both are parts of one and the same memory.
    #[must_use]
    pub fn same_memory(&self, other: &Self) -> bool {
        self.region.same_memory(&other.region)
    }

    /// The region for the crate, which writes through it only if it may.
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
