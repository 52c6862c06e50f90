//! Why one backend does not register a span, as the record of a registration says it.

use terrane_core::{ForkedProcess, StorageKind};

use crate::{MemoryType, Status};

/// Why one backend did not register a span.
///
/// It is the cause in a [`BackendOutcome`](terrane_core::BackendOutcome) and in a
/// [`RegisterError::RequiredBackend`](terrane_core::RegisterError::RequiredBackend), from which it
/// is had by `downcast_ref`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The backend says that it takes no memory of this type. It was not asked.
    #[error("it takes no {memory} memory")]
    MemoryType {
        /// The type.
        memory: MemoryType,
    },
    /// NIXL has no notion of this memory.
    #[error("NIXL registers no {kind} memory")]
    Kind {
        /// The kind.
        kind: StorageKind,
    },
    /// The backend is to reach files by their direct descriptor, and this one has none.
    #[error(
        "it reaches files around the page cache, and the file is open for buffered access only; \
         open it with direct I/O, or configure `FileAccess::Buffered`"
    )]
    NoDirectDescriptor,
    /// The span has no bytes. NIXL would register all of a file for an empty span of it.
    #[error("the span is empty; register at least a byte")]
    Empty,
    /// The file's descriptor is none.
    #[error("{0} is no descriptor of a file")]
    Descriptor(i32),
    /// The process was forked from one that had built an agent. The backend was not asked.
    #[error("NIXL cannot be used in a forked process; start another program with `exec` for that")]
    Forked(#[from] ForkedProcess),
    /// The backend was asked, and refused.
    #[error("{0}; NIXL's log on standard error may say why")]
    Status(Status),
    /// UCX refused memory of a device, and could not load a module without which it takes that for
    /// memory of the host.
    #[error(
        "{status}; UCX takes it for memory of the host, as it could not load its {module}: that \
         needs {needs}"
    )]
    UcxModule {
        /// What NIXL said.
        status: Status,
        /// How the module's file name begins.
        module: &'static str,
        /// What the module needs of the machine.
        needs: &'static str,
    },
}

impl Refusal {
    /// Whether the backend takes no memory of this kind, whichever piece it is.
    #[must_use]
    pub const fn is_by_kind(&self) -> bool {
        matches!(self, Self::MemoryType { .. } | Self::Kind { .. })
    }
}
