//! The description of one region: its location, its length, and its backends.

use std::sync::Arc;

use terrane_core::{BackendName, ByteCount, RemoteSpace};

use super::encoding::{read_region, write_region};
use crate::error::WireError;
use crate::frame::input::{check_canonical, check_set};
use crate::frame::{self, Content};
use crate::limits::WireLimits;

/// A region of registered memory, as its owner describes it to others.
///
/// It is plain data: it keeps no memory alive, and its address is valid only in the owner's process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RegionDescriptor {
    space: RemoteSpace,
    address: u64,
    length: ByteCount,
    backends: Arc<[BackendName]>,
}

impl RegionDescriptor {
    /// Describes `length` bytes starting at `address`, which `backends` have accepted.
    ///
    /// The backends are sorted, and duplicates removed.
    #[must_use]
    pub fn new(
        space: RemoteSpace,
        address: u64,
        length: ByteCount,
        backends: impl IntoIterator<Item = BackendName>,
    ) -> Self {
        let mut backends: Vec<BackendName> = backends.into_iter().collect();
        if !backends.is_sorted_by(|a, b| a < b) {
            backends.sort();
            backends.dedup();
        }
        Self::with_set(space, address, length, backends.into())
    }

    /// Like [`new`](Self::new), with backends that are sorted and shared with other regions.
    pub(crate) fn with_set(
        space: RemoteSpace,
        address: u64,
        length: ByteCount,
        backends: Arc<[BackendName]>,
    ) -> Self {
        Self { space, address, length, backends }
    }

    /// The owner's address space that the region is in.
    #[must_use]
    pub const fn space(&self) -> RemoteSpace {
        self.space
    }

    /// The region's address in that space; the offset in a file.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// The region's length.
    #[must_use]
    pub const fn length(&self) -> ByteCount {
        self.length
    }

    /// The backends that accepted the region, sorted.
    #[must_use]
    pub fn backends(&self) -> &[BackendName] {
        &self.backends
    }

    /// Whether it contains all of `other`, in the same space.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let end = |region: &Self| region.address.checked_add(region.length.get());
        self.space == other.space
            && self.address <= other.address
            && matches!((end(self), end(other)), (Some(ours), Some(theirs)) if ours >= theirs)
    }

    /// Whether the end of the region is an address or, in a file, an offset (at most 2^63 − 1).
    pub(crate) fn is_addressable(&self) -> bool {
        let end = self.address.checked_add(self.length.get());
        match self.space {
            RemoteSpace::File(_) => end.is_some_and(|end| i64::try_from(end).is_ok()),
            _ => end.is_some(),
        }
    }

    /// Encodes this region alone, in a frame.
    ///
    /// # Errors
    ///
    /// [`WireError::Name`], [`WireError::AddressOverflow`], and [`WireError::UnknownSpace`] for a
    /// space that is newer than the format.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        self.check()?;
        frame::seal(Content::Region, |frame| write_region(self, frame))
    }

    /// Decodes bytes that [`encode`](Self::encode) returned; refuses all others.
    ///
    /// # Errors
    ///
    /// [`WireError`] names the first error in the bytes.
    pub fn decode(bytes: &[u8], limits: &WireLimits) -> Result<Self, WireError> {
        let payload = frame::open(Content::Region, bytes, limits)?;
        let region = read_region(&payload, limits)?;
        region.check()?;
        check_canonical(bytes, &region.encode()?)?;
        Ok(region)
    }

    fn check(&self) -> Result<(), WireError> {
        check_set(0, &self.backends)?;
        if self.is_addressable() {
            return Ok(());
        }
        Err(WireError::AddressOverflow { region: 0, address: self.address, length: self.length })
    }
}
