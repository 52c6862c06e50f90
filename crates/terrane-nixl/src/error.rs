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
        /// What was looked for.
        library: &'static str,
        /// What the loader said.
        #[source]
        source: SharedCause,
    },
    /// The file that was named is not there, or the loader refuses it.
    #[error("{} cannot be loaded; name the file libnixl_capi.so of an installation", .library.display())]
    FileMissing {
        /// What was named.
        library: PathBuf,
        /// What the loader said.
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
    /// What was found are stubs, behind which there is no library.
    #[error("{} holds only stubs; install the library itself", .library.display())]
    Stub {
        /// The library that was loaded.
        library: PathBuf,
    },
    /// The bindings would find another library, or none: they look for `libnixl_capi.so`, and a
    /// library that is loaded already is found by the name that it has in it.
    #[error(
        "{} is not what NIXL's bindings find as libnixl_capi.so, {}; name the file of an installation \
         whose library has that name in it (SONAME), and keep others out of LD_LIBRARY_PATH",
        .library.display(),
        .found.as_ref().map_or_else(|| "which is nothing".into(), |found| format!("which is {}", found.display()))
    )]
    NotByName {
        /// The library that was loaded.
        library: PathBuf,
        /// The library that goes by the name.
        found: Option<PathBuf>,
    },
    /// The bindings looked for the library before it was there, and look only once.
    #[error(
        "NIXL's bindings looked for {} before it could be found, and look only once; start the \
         process again, and call `probe` first",
        .library.display()
    )]
    BindingsGaveUp {
        /// The library that can be loaded by now.
        library: PathBuf,
    },
}

/// Why a plugin of NIXL is of no use.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginFailed {
    /// The loader refuses the plugin, or a library that it needs.
    #[error("{} cannot be loaded; provide what the loader misses", .plugin.display())]
    NotLoaded {
        /// The plugin's file.
        plugin: PathBuf,
        /// What the loader said.
        #[source]
        source: SharedCause,
    },
    /// The file is a library, and no plugin.
    #[error("{} has no `nixl_plugin_init`, so that it is no plugin of NIXL", .plugin.display())]
    NoPlugin {
        /// The file.
        plugin: PathBuf,
    },
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
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start another program with `exec` for that")]
    Forked(#[from] ForkedProcess),
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
    /// A name that no peer takes.
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
    /// NIXL would choose the port and not say which.
    #[error("an agent cannot listen on port 0; name a port")]
    NoPort,
    /// An agent cannot listen on this port.
    #[error("agent {name} cannot listen on port {port}; choose another")]
    Port {
        /// The agent.
        name: AgentName,
        /// The port.
        port: u16,
        /// Why not.
        #[source]
        source: OsError,
    },
    /// A time that NIXL cannot count.
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
        /// What NIXL said.
        status: Status,
    },
    /// A backend was asked for twice.
    #[error("backend {backend} is asked for twice; an agent has one of each")]
    DuplicateBackend {
        /// The backend.
        backend: BackendName,
    },
    /// Two backends that no agent can have together.
    #[error("no agent has {first} and {second} together; choose one of them")]
    IllegalCombination {
        /// One of them.
        first: BackendName,
        /// The other.
        second: BackendName,
    },
    /// A backend of which it is not known that it stands several threads at once.
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
    /// There is a plugin, and it is of no use.
    #[error("the plugin of backend {backend} does not work")]
    Plugin {
        /// The backend.
        backend: BackendName,
        /// Why not.
        #[source]
        source: PluginFailed,
    },
    /// NIXL has a plugin, and refuses it.
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
        /// Those that its plugin names.
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
    /// The plugin works, and created no backend.
    #[error(
        "NIXL created no backend {backend}: {status}; check its parameters, and NIXL's log on \
         standard error"
    )]
    Backend {
        /// The backend.
        backend: BackendName,
        /// What NIXL said.
        status: Status,
    },
    /// The engine's thread could not be started.
    #[error(
        "the engine's thread could not be started; raise the limit on threads or on memory, or make \
         fewer engines"
    )]
    Thread {
        /// What the system said.
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
        /// Those that it has.
        available: Vec<BackendName>,
    },
    /// The agent does not know the peer, or no more.
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
    /// A question to the library failed.
    #[error("{operation} failed: {status}; NIXL's log on standard error says more")]
    Call {
        /// The question.
        operation: &'static str,
        /// What NIXL said.
        status: Status,
    },
    /// An environment variable with a value that means nothing.
    #[error("{name}={value:?} means nothing: it should be {expected}")]
    InvalidVariable {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// What is expected.
        expected: &'static str,
    },
    /// An environment variable that looks like a setting, and is none.
    #[error("there is no setting {name}; correct it, or unset it")]
    UnknownVariable {
        /// The variable.
        name: String,
    },
    /// An environment variable about a backend that is not asked for.
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

/// What a call of NIXL said, as far as its bindings pass it on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// An argument was refused.
    InvalidParameter,
    /// A backend failed, or NIXL itself did.
    Backend,
    /// Nothing of that name, or nothing that serves the request.
    NotFound,
    /// NIXL refused to make a request, and its bindings do not pass on why.
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

    /// What becomes of an error of the bindings in a question that should not fail.
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
