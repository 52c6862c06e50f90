//! The error types of this crate.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use terrane_core::{AgentName, BackendName, ForkedProcess, OsError, PeerId};

/// A cause that several errors may share.
pub(crate) type SharedCause = Arc<dyn std::error::Error + Send + Sync>;

/// Why NIXL cannot be used in this process.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlUnavailable {
    /// The library is not on this machine, or the loader refuses it.
    #[error(
        "NIXL's library {library} cannot be loaded; install NIXL, and name the library's directory \
         in LD_LIBRARY_PATH before the process starts"
    )]
    LibraryMissing {
        /// The library's file name.
        library: &'static str,
        /// The loader's error.
        #[source]
        source: SharedCause,
    },
    /// The named file does not exist, or the loader refuses it.
    #[error("{} cannot be loaded; name the file libnixl_capi.so of an installation", .library.display())]
    FileMissing {
        /// The named file.
        library: PathBuf,
        /// The loader's error.
        #[source]
        source: SharedCause,
    },
    /// The library lacks a function.
    #[error("{} has no `{symbol}`; install NIXL 1.5.1", .library.display())]
    SymbolMissing {
        /// The library that was loaded.
        library: PathBuf,
        /// The first function that it lacks.
        symbol: &'static str,
    },
    /// The library holds only stubs, and the real library is missing.
    #[error("{} holds only stubs; install the library itself", .library.display())]
    Stub {
        /// The library that was loaded.
        library: PathBuf,
    },
    /// The bindings would find another library, or none. They look for `libnixl_capi.so`, and the
    /// loader finds a loaded library by its soname.
    #[error(
        "{} is not what NIXL's bindings find as libnixl_capi.so, {}; name the file of an installation \
         whose library has that name in it (SONAME), and keep others out of LD_LIBRARY_PATH",
        .library.display(),
        .found.as_ref().map_or_else(|| "which is nothing".into(), |found| format!("which is {}", found.display()))
    )]
    NotByName {
        /// The library that was loaded.
        library: PathBuf,
        /// The library that has the soname.
        found: Option<PathBuf>,
    },
    /// The bindings looked for the library before it was installed, and look only once.
    #[error(
        "NIXL's bindings looked for {} before it could be found, and look only once; start the \
         process again, and call `probe` first",
        .library.display()
    )]
    BindingsGaveUp {
        /// The library that can be loaded now.
        library: PathBuf,
    },
}

/// Why a NIXL plugin cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginFailed {
    /// The loader refuses the plugin, or a library that it needs.
    #[error("{} cannot be loaded; provide what the loader misses", .plugin.display())]
    NotLoaded {
        /// The plugin's file.
        plugin: PathBuf,
        /// The loader's error.
        #[source]
        source: SharedCause,
    },
    /// The file is a library, but not a plugin.
    #[error("{} has no `nixl_plugin_init`, so that it is no plugin of NIXL", .plugin.display())]
    NoPlugin {
        /// The file.
        plugin: PathBuf,
    },
}

/// Why a request to NIXL failed.
///
/// Displaying a variant does not need the library, and no variant holds a type of the bindings.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// NIXL cannot be used at all.
    #[error(transparent)]
    Unavailable(#[from] NixlUnavailable),
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start another program with `exec` for that")]
    Forked(#[from] ForkedProcess),
    /// An agent without a name.
    #[error("an agent needs a name; give one, or use `AgentBuilder::unnamed`")]
    EmptyName,
    /// A text with a NUL byte, which C strings cannot hold.
    #[error("the {what} {text:?} contains a NUL; give one without")]
    Nul {
        /// The kind of text.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// A name that peers refuse.
    #[error("the name {:?} of an agent has a control character; give one that can be printed", .name.as_str())]
    ControlCharacter {
        /// The name.
        name: AgentName,
    },
    /// Another agent of this process has the name.
    #[error(
        "this process has an agent {name} already; drop it and all that is registered with it, or \
         give this one another name"
    )]
    NameTaken {
        /// The name.
        name: AgentName,
    },
    /// NIXL would choose the port and not return it.
    #[error("an agent cannot listen on port 0; name a port")]
    NoPort,
    /// An agent cannot listen on this port.
    #[error("agent {name} cannot listen on port {port}; choose another")]
    Port {
        /// The agent.
        name: AgentName,
        /// The port.
        port: u16,
        /// The system's error.
        #[source]
        source: OsError,
    },
    /// A delay that NIXL cannot represent.
    #[error("a progress thread cannot rest for {seconds} seconds; choose a shorter delay")]
    DelayTooLong {
        /// The delay, in seconds.
        seconds: u64,
    },
    /// NIXL refused to create the agent.
    #[error("NIXL created no agent {name}: {status}; its log on standard error may say why")]
    Agent {
        /// Its name.
        name: AgentName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// A backend was named twice.
    #[error("backend {backend} is asked for twice; an agent has one of each")]
    DuplicateBackend {
        /// The backend.
        backend: BackendName,
    },
    /// Two backends that one agent cannot have together.
    #[error("no agent has {first} and {second} together; choose one of them")]
    IllegalCombination {
        /// One of them.
        first: BackendName,
        /// The other.
        second: BackendName,
    },
    /// A backend that is not known to be thread-safe.
    #[error(
        "backend {backend} is not known to stand several threads at once, which it has to in the \
         mode `ReadWrite`; use `ThreadMode::Strict`"
    )]
    NotSelfLocking {
        /// The backend.
        backend: BackendName,
    },
    /// NIXL finds no plugin of this name.
    #[error("NIXL has no plugin {backend}; it finds {}", names(.available))]
    UnknownPlugin {
        /// The backend.
        backend: BackendName,
        /// The plugins that it finds.
        available: Vec<BackendName>,
    },
    /// The plugin exists but does not work.
    #[error("the plugin of backend {backend} does not work")]
    Plugin {
        /// The backend.
        backend: BackendName,
        /// The plugin's error.
        #[source]
        source: PluginFailed,
    },
    /// NIXL has a plugin, but refuses it.
    #[error("NIXL refuses the plugin of backend {backend}; its log on standard error says why")]
    PluginRefused {
        /// The backend.
        backend: BackendName,
    },
    /// A parameter that the backend does not know, and would ignore.
    #[error(
        "backend {backend} knows no parameter {parameter}, but {}; correct it, or pass it \
         unchecked",
        list(.known)
    )]
    UnknownParameter {
        /// The backend.
        backend: BackendName,
        /// The parameter.
        parameter: String,
        /// The parameters that its plugin names.
        known: Vec<String>,
    },
    /// A parameter was set twice.
    #[error("parameter {parameter} of backend {backend} is set twice; set it once")]
    DuplicateParameter {
        /// The backend.
        backend: BackendName,
        /// The parameter.
        parameter: String,
    },
    /// The plugin works, but created no backend.
    #[error(
        "NIXL created no backend {backend}: {status}; check its parameters, and NIXL's log on \
         standard error"
    )]
    Backend {
        /// The backend.
        backend: BackendName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// The engine's thread could not be started.
    #[error(
        "the engine's thread could not be started; raise the limit on threads or on memory, or make \
         fewer engines"
    )]
    Thread {
        /// The system's error.
        #[source]
        source: OsError,
    },
    /// A backend that the agent does not have.
    #[error("agent {agent} has no backend {backend}; it has {}", names(.available))]
    NoSuchBackend {
        /// The agent.
        agent: AgentName,
        /// The backend.
        backend: BackendName,
        /// The backends that it has.
        available: Vec<BackendName>,
    },
    /// The agent does not know the peer, or has forgotten it.
    #[error("agent {agent} knows no peer {peer}; import one of its layouts")]
    UnknownPeer {
        /// The agent.
        agent: AgentName,
        /// The peer.
        peer: PeerId,
    },
    /// The connection to the peer has broken.
    #[error(
        "agent {agent} has lost its connection to peer {peer}; import one of its layouts again, or what \
         it exports now if it was started again"
    )]
    PeerLost {
        /// The agent.
        agent: AgentName,
        /// The peer.
        peer: AgentName,
    },
    /// A query to the library failed.
    #[error("{operation} failed: {status}; NIXL's log on standard error says more")]
    Call {
        /// The query.
        operation: &'static str,
        /// The status that NIXL returned.
        status: Status,
    },
    /// An environment variable with an invalid value.
    #[error("{name}={value:?} means nothing: it should be {expected}")]
    InvalidVariable {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// The expected values.
        expected: &'static str,
    },
    /// An environment variable with the settings' prefix that is not a setting.
    #[error("there is no setting {name}; correct it, or unset it")]
    UnknownVariable {
        /// The variable.
        name: String,
    },
    /// An environment variable for a backend that is not requested.
    #[error(
        "{name} is about backend {backend}, which TERRANE_NIXL_BACKENDS does not name; name it there, \
         or unset {name}"
    )]
    VariableWithoutBackend {
        /// The variable.
        name: String,
        /// The backend.
        backend: BackendName,
    },
}

/// The status of a NIXL call, as far as its bindings pass it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// An argument was refused.
    InvalidParameter,
    /// A backend or NIXL itself failed.
    Backend,
    /// No item has that name, or no item serves the request.
    NotFound,
    /// NIXL refused to create a request, and its bindings do not pass on why.
    Refused,
    /// There is no telemetry of a transfer.
    NoTelemetry,
    /// The bindings failed before or after the call.
    Bindings,
}

impl Status {
    pub(crate) fn of(error: &nixl_sys::NixlError) -> Self {
        use nixl_sys::NixlError as E;
        match error {
            E::InvalidParam => Self::InvalidParameter,
            E::BackendError => Self::Backend,
            E::NotFound => Self::NotFound,
            E::FailedToCreateXferRequest => Self::Refused,
            E::NoTelemetry => Self::NoTelemetry,
            _ => Self::Bindings,
        }
    }

    /// Converts an error of the bindings in a query that should not fail.
    pub(crate) fn during(
        operation: &'static str,
    ) -> impl FnOnce(nixl_sys::NixlError) -> NixlError + Copy {
        move |error| NixlError::Call { operation, status: Self::of(&error) }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::InvalidParameter => "an argument was refused",
            Self::Backend => "the backend failed",
            Self::NotFound => "not found",
            Self::Refused => "NIXL refused",
            Self::NoTelemetry => "no telemetry",
            Self::Bindings => "the bindings failed",
        })
    }
}

impl std::error::Error for Status {}

fn names(backends: &[BackendName]) -> String {
    let names: Vec<_> = backends.iter().map(|name| name.as_str().to_owned()).collect();
    list(&names)
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}
