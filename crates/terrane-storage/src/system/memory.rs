//! What system memory is while it lives.

use std::ptr::NonNull;
use std::sync::Arc;

use terrane_core::{
    Alignment, ByteCount, CapabilityReport, HostAddress, Location, Memory, OsError, StorageKind,
};

use super::background::Toucher;
use super::huge;
use super::mapping::Mapping;

/// A region of system memory, unmapped when it drops.
#[derive(Debug)]
pub struct SystemMemory {
    pub(super) address: HostAddress,
    pub(super) length: ByteCount,
    /// Before the mapping, as fields drop in their order; `None` if no thread touches it.
    pub(super) toucher: Option<Toucher>,
    /// `None` for no bytes.
    pub(super) mapping: Option<Arc<Mapping>>,
    pub(super) report: CapabilityReport,
}

impl SystemMemory {
    pub(super) fn empty(alignment: Alignment, report: CapabilityReport) -> Self {
        let alignment = ByteCount::new(alignment.get()).to_usize();
        let address = std::ptr::without_provenance_mut::<u8>(alignment);
        Self {
            address: HostAddress::new(NonNull::new(address).unwrap_or(NonNull::dangling())),
            length: ByteCount::ZERO,
            toucher: None,
            mapping: None,
            report,
        }
    }

    /// How many of the bytes are in huge pages at this moment, as `/proc/self/smaps` tells; too
    /// low rather than too high where the kernel has merged the mapping with a neighbour.
    ///
    /// The kernel walks all memory of the process for this, so it is no call for a hot path.
    ///
    /// # Errors
    ///
    /// The code with which reading `/proc/self/smaps` failed.
    pub fn huge_bytes(&self) -> Result<ByteCount, OsError> {
        self.mapping.as_deref().map_or(Ok(ByteCount::ZERO), huge_bytes)
    }
}

// SAFETY: the bytes are a private mapping of this value's, readable, writable and zeroed by the
// kernel, which stays until the value drops, wherever that moves.
unsafe impl Memory for SystemMemory {
    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn location(&self) -> Location {
        Location::Host(self.address)
    }

    fn length(&self) -> ByteCount {
        self.length
    }

    fn capabilities(&self) -> CapabilityReport {
        self.report.clone()
    }
}

/// How many bytes of a mapping are in huge pages.
pub(super) fn huge_bytes(mapping: &Mapping) -> Result<ByteCount, OsError> {
    let begin = HostAddress::new(mapping.address()).get();
    huge::huge_bytes(begin..begin + ByteCount::from_usize(mapping.length()).get())
}
