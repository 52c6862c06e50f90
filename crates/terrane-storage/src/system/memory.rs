//! System memory that has been allocated.

use std::ptr::NonNull;
use std::sync::Arc;

use terrane_core::convert::to_u64;
use terrane_core::{
    Alignment, ByteCount, CapabilityReport, HostAddress, Location, Memory, OsError, StorageKind,
};

use super::background::BackgroundTouch;
use super::huge;
use super::mapping::Mapping;

/// A region of system memory. The drop unmaps it.
#[derive(Debug)]
pub struct SystemMemory {
    pub(super) address: HostAddress,
    pub(super) length: ByteCount,
    /// Declared before the mapping, because fields drop in declaration order. `None` if no thread
    /// touches the memory.
    pub(super) background_touch: Option<BackgroundTouch>,
    /// `None` for a region of zero bytes.
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
            background_touch: None,
            mapping: None,
            report,
        }
    }

    /// The address of the bytes.
    #[must_use]
    pub const fn address(&self) -> HostAddress {
        self.address
    }

    /// The number of bytes that are in huge pages now, from `/proc/self/smaps`. The number may be
    /// too low if the kernel has merged the mapping with a neighbour. It is never too high.
    ///
    /// The kernel walks all memory of the process for this. Do not call it on a hot path.
    ///
    /// # Errors
    ///
    /// The error from reading `/proc/self/smaps`.
    pub fn huge_bytes(&self) -> Result<ByteCount, OsError> {
        self.mapping.as_deref().map_or(Ok(ByteCount::ZERO), huge_bytes)
    }
}

// SAFETY: the bytes are a private mapping of this value, readable, writable and zeroed by the
// kernel. The mapping stays at its address until the value drops, even if the value moves.
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

/// The number of bytes of a mapping in huge pages.
pub(super) fn huge_bytes(mapping: &Mapping) -> Result<ByteCount, OsError> {
    let begin = HostAddress::new(mapping.address()).get();
    huge::huge_bytes(begin..begin + to_u64(mapping.length()))
}
