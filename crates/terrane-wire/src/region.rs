//! The description of one region: where it is, how long, and who takes it.

use std::sync::Arc;

use terrane_core::{BackendName, ByteCount, RemoteSpace};

use crate::frame::{self, Content};
use crate::input::{check_canonical, check_set};
use crate::region_form::{read_region, write_region};
use crate::{WireError, WireLimits};

/// A region of registered memory, as its owner describes it to others.
///
/// Plain data: it keeps nothing alive, and its address means something in the owner's process only.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RegionDescriptor {
    space: RemoteSpace,
    address: u64,
    length: ByteCount,
    backends: Arc<[BackendName]>,
}

impl RegionDescriptor {
    /// Describes `length` bytes from `address` on, which `backends` have accepted.
    ///
    /// The order of the backends carries no meaning, and neither does one that is named twice:
    /// they are kept sorted, each once.
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

    /// As [`new`](Self::new), with backends that are sorted and shared with other regions.
    pub(crate) fn with_set(
        space: RemoteSpace,
        address: u64,
        length: ByteCount,
        backends: Arc<[BackendName]>,
    ) -> Self {
        Self { space, address, length, backends }
    }

    /// Which of the owner's address spaces it is in.
    #[must_use]
    pub const fn space(&self) -> RemoteSpace {
        self.space
    }

    /// Where it begins there; in a file, bytes from the file's beginning.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// How long it is.
    #[must_use]
    pub const fn length(&self) -> ByteCount {
        self.length
    }

    /// The backends that accepted it, sorted.
    #[must_use]
    pub fn backends(&self) -> &[BackendName] {
        &self.backends
    }

    /// Whether this is the whole of `other`, or more, in the same space.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        let end = |region: &Self| region.address.checked_add(region.length.get());
        self.space == other.space
            && self.address <= other.address
            && matches!((end(self), end(other)), (Some(ours), Some(theirs)) if ours >= theirs)
    }

    /// Whether the end of the region is an address, or, in a file, an offset (at most 2^63 − 1).
    pub(crate) fn is_addressable(&self) -> bool {
        let end = self.address.checked_add(self.length.get());
        match self.space {
            RemoteSpace::File(_) => end.is_some_and(|end| i64::try_from(end).is_ok()),
            _ => end.is_some(),
        }
    }

    /// The bytes that travel: this region alone, framed and versioned.
    ///
    /// # Errors
    ///
    /// [`WireError::Name`], [`WireError::AddressOverflow`], and [`WireError::UnknownTag`] for a
    /// space that is newer than the format.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        self.check()?;
        frame::seal(Content::Region, |frame| write_region(self, frame))
    }

    /// Reads what [`encode`](Self::encode) wrote, and nothing else.
    ///
    /// # Errors
    ///
    /// [`WireError`] says what of the bytes is wrong.
    pub fn decode(bytes: &[u8], limits: &WireLimits) -> Result<Self, WireError> {
        let opened = frame::open(Content::Region, bytes, limits)?;
        let region = read_region(&opened, limits)?;
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
