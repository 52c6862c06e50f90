//! The reasons why a backend does not register a span, as a registration's record lists them.

use terrane_core::{ForkedProcess, StorageKind};

use super::descriptor::Descriptor;
use crate::bindings::memory_type::MemoryType;
use crate::bindings::status::Status;

/// The reason why one backend did not register a span.
///
/// It is the cause in a [`BackendOutcome`](terrane_core::BackendOutcome) and in a
/// [`RegisterError::RequiredBackend`](terrane_core::RegisterError::RequiredBackend); `downcast_ref`
/// returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The backend declares no support for this memory type, so it was not called.
    #[error("the backend does not support {memory} memory; add a backend that does")]
    MemoryType {
        /// The type.
        memory: MemoryType,
    },
    /// NIXL has no type for this memory.
    #[error("NIXL cannot register {kind} memory; register host memory, device memory or a file")]
    Kind {
        /// The kind.
        kind: StorageKind,
    },
    /// The backend uses direct descriptors for files, and this file has none.
    #[error(
        "the backend bypasses the page cache, and the file is open only for buffered access; open it \
         with direct I/O, or configure `FileAccess::Buffered`"
    )]
    NoDirectDescriptor,
    /// The span is empty. For an empty span of a file, NIXL would register the whole file.
    #[error("the span is empty; register at least one byte")]
    Empty,
    /// The file's descriptor is invalid.
    #[error("{0} is not a file descriptor; register an open file")]
    Descriptor(i32),
    /// The process was forked from one that had built an agent. The backend was not asked.
    #[error("NIXL cannot be used in a forked process; start a new program with `exec` instead")]
    Forked(#[from] ForkedProcess),
    /// NIXL would not find all bytes of one of two registrations that overlap, so the backend was
    /// not called. NIXL finds a registration only by the last start at or before the bytes.
    #[error(
        "NIXL would not find all bytes of {requested} and of {registered}, which is in use; register \
         the longer span first and keep its registration, or drop that of the shorter span"
    )]
    Overlap {
        /// The requested registration.
        requested: Descriptor,
        /// The registration that is in use.
        registered: Descriptor,
    },
    /// The backend refused.
    #[error("{0}; see NIXL's log on standard error")]
    Status(Status),
    /// UCX refused device memory. It could not load a module that recognizes such memory, and
    /// treated it as host memory.
    #[error(
        "{status}; UCX treated it as host memory because it could not load its module {module}; \
         install {needs}"
    )]
    UcxModule {
        /// The status that NIXL returned.
        status: Status,
        /// The prefix of the module's file name.
        module: &'static str,
        /// The dependency of the module that this machine may lack.
        needs: &'static str,
    },
}

impl Refusal {
    /// Whether the backend refuses every memory of this kind.
    pub(crate) const fn is_by_kind(&self) -> bool {
        matches!(self, Self::MemoryType { .. } | Self::Kind { .. })
    }
}
