//! The error types of this crate.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use terrane_core::{AgentName, BackendName, StorageKind};

use crate::MemoryType;

/// A cause that several errors may share.
pub(crate) type SharedCause = Arc<dyn std::error::Error + Send + Sync>;

/// Why NIXL cannot be used in this process.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlUnavailable {
    /// The library is not on this machine, or the loader refuses it.
    #[error(
        "NIXL's library {library} cannot be loaded; install NIXL, and put the directory that it \
         lies in into LD_LIBRARY_PATH before the process starts"
    )]
    LibraryMissing {
        /// What was looked for.
        library: &'static str,
        /// What the loader said.
        #[source]
        source: SharedCause,
    },
    /// The library lacks a function.
    #[error("{} has no `{symbol}`; install NIXL 1.5.1 or later", .library.display())]
    SymbolMissing {
        /// The library that was loaded.
        library: PathBuf,
        /// The first function that it lacks.
        symbol: &'static str,
    },
    /// What was found are stubs, behind which there is no library.
    #[error("{} holds stubs only; install the real library of NIXL", .library.display())]
    Stub {
        /// The library that was loaded.
        library: PathBuf,
    },
    /// The bindings looked for the library before it was there, and look only once.
    #[error(
        "the bindings of NIXL looked for the library before it could be found, and look only \
         once; start the process again"
    )]
    BindingsGaveUp,
}

/// Why something could not be had of NIXL.
///
/// No variant needs the library to be shown, and none holds a type of the bindings.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// NIXL cannot be used at all.
    #[error(transparent)]
    Unavailable(#[from] NixlUnavailable),
    /// An agent without a name.
    #[error("an agent needs a name; give one, or use `AgentBuilder::unnamed`")]
    EmptyName,
    /// A text that C cannot hold.
    #[error("the {what} {text:?} contains a NUL; give one without")]
    Nul {
        /// What the text is.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// Another agent of this process has the name.
    #[error(
        "this process has an agent {name} already; drop it with all that is registered with it, \
         or give this one another name"
    )]
    NameTaken {
        /// The name.
        name: AgentName,
    },
    /// NIXL refused to create the agent.
    #[error("NIXL created no agent {name}: {status}")]
    Agent {
        /// Its name.
        name: AgentName,
        /// What NIXL said.
        status: Status,
    },
    /// A backend was asked for twice.
    #[error("backend {backend} is asked for twice; an agent has one of each")]
    DuplicateBackend {
        /// The backend.
        backend: BackendName,
    },
    /// NIXL refused to create the backend.
    #[error("NIXL created no backend {backend}: {status}; its log on standard error says more")]
    Backend {
        /// The backend.
        backend: BackendName,
        /// What NIXL said.
        status: Status,
    },
    /// The engine's thread could not be started.
    #[error("the engine's thread could not be started")]
    Thread {
        /// What the system said.
        #[source]
        source: terrane_core::OsError,
    },
    /// A question to the library failed.
    #[error("{operation} failed: {status}")]
    Call {
        /// The question.
        operation: &'static str,
        /// What NIXL said.
        status: Status,
    },
}

/// What a call of NIXL said, as far as its C interface says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// An argument was refused.
    InvalidParameter,
    /// A backend failed, or NIXL itself did.
    Backend,
    /// Nothing of that name, or nothing that serves the request.
    NotFound,
    /// There is no telemetry of a transfer.
    NoTelemetry,
    /// The bindings failed, not the library.
    Bindings,
}

impl Status {
    pub(crate) fn of(error: &nixl_sys::NixlError) -> Self {
        use nixl_sys::NixlError as E;
        match error {
            E::InvalidParam => Self::InvalidParameter,
            E::BackendError => Self::Backend,
            E::NotFound => Self::NotFound,
            E::NoTelemetry => Self::NoTelemetry,
            _ => Self::Bindings,
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InvalidParameter => "an argument was refused",
            Self::Backend => "the backend failed",
            Self::NotFound => "not found",
            Self::NoTelemetry => "no telemetry",
            Self::Bindings => "the bindings failed",
        })
    }
}

impl std::error::Error for Status {}

/// Why one backend did not register a span.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The backend says that it takes no memory of this type.
    #[error("it takes no {memory} memory")]
    MemoryType {
        /// The type.
        memory: MemoryType,
    },
    /// The backend is told to reach files by their direct descriptor, and this one has none.
    #[error("the file has no descriptor for direct I/O; open it with direct I/O")]
    NoDirectDescriptor,
    /// The backend was asked, and refused.
    #[error("{0}")]
    Status(Status),
    /// NIXL has no notion of this memory.
    #[error("NIXL knows no {kind} memory")]
    Kind {
        /// The kind.
        kind: StorageKind,
    },
    /// NIXL takes an empty span of a file for all of the file.
    #[error("the span is empty")]
    Empty,
    /// A descriptor that is no number of an open file.
    #[error("the file's descriptor {0} is negative")]
    Descriptor(i32),
}
