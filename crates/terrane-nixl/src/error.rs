//! The error types of this crate.

use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;

use terrane_core::{AgentName, BackendName, ForkedProcess, OsError, PeerId};

use crate::bindings::status::Status;

/// A cause that several errors may share.
pub(crate) type SharedCause = Arc<dyn std::error::Error + Send + Sync>;

/// The reason why NIXL cannot be used in this process.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlUnavailable {
    /// The library is not on this machine, or the loader refuses it.
    #[error(
        "NIXL's library {library} cannot be loaded; install NIXL, and add the library's directory to \
         LD_LIBRARY_PATH before the process starts"
    )]
    LibraryMissing {
        /// The library's file name.
        library: &'static str,
        /// The loader's error.
        #[source]
        source: SharedCause,
    },
    /// The named file does not exist, or the loader refuses it.
    #[error("{} cannot be loaded; pass the path of an installation's libnixl_capi.so", .library.display())]
    FileMissing {
        /// The named file.
        library: PathBuf,
        /// The loader's error.
        #[source]
        source: SharedCause,
    },
    /// The library lacks a function.
    #[error("{} lacks the function `{symbol}`; install NIXL 1.5.1", .library.display())]
    SymbolMissing {
        /// The library that was loaded.
        library: PathBuf,
        /// The first function that it lacks.
        symbol: &'static str,
    },
    /// The library holds only stubs, and the real library is missing.
    #[error("{} contains only stubs; install the real library", .library.display())]
    Stub {
        /// The library that was loaded.
        library: PathBuf,
    },
    /// The bindings would find another library, or none. They look up `libnixl_capi.so`, and the
    /// loader finds a loaded library by its soname.
    #[error(
        "NIXL's bindings look up libnixl_capi.so and find {}, not {}; pass a library with that SONAME, \
         and remove others from LD_LIBRARY_PATH",
        .found.as_ref().map_or_else(|| "no library".into(), |found| found.display().to_string()),
        .library.display()
    )]
    NotByName {
        /// The library that was loaded.
        library: PathBuf,
        /// The library that has the soname.
        found: Option<PathBuf>,
    },
    /// The bindings looked the library up before it was installed. They do so only once.
    #[error(
        "NIXL's bindings looked up {} before it was installed, and look it up only once; restart the \
         process, and call `probe` first",
        .library.display()
    )]
    BindingsGaveUp {
        /// The library that can be loaded now.
        library: PathBuf,
    },
}

/// The reason why a NIXL plugin cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PluginError {
    /// The loader refuses the plugin, or a library that it needs.
    #[error("{} cannot be loaded; install the library that the loader reports as missing", .plugin.display())]
    NotLoaded {
        /// The plugin's file.
        plugin: PathBuf,
        /// The loader's error.
        #[source]
        source: SharedCause,
    },
    /// The file is a library, but not a plugin.
    #[error("{} has no function `nixl_plugin_init`, so it is not a NIXL plugin; remove it from the plugin directory", .plugin.display())]
    NoPlugin {
        /// The file.
        plugin: PathBuf,
    },
}

/// The reason why a request to NIXL failed.
///
/// Displaying a variant does not need the library. No variant has a type of the bindings.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NixlError {
    /// NIXL cannot be used at all.
    #[error(transparent)]
    Unavailable(#[from] NixlUnavailable),
    /// The process was forked from one that had built an agent.
    #[error("NIXL cannot be used in a forked process; start a new program with `exec` instead")]
    Forked(#[from] ForkedProcess),
    /// An agent without a name.
    #[error("the agent's name is empty; set one, or use `AgentBuilder::unnamed`")]
    EmptyName,
    /// A text with a NUL byte, which C strings cannot hold.
    #[error("the {what} {text:?} contains a NUL byte; remove it")]
    Nul {
        /// The kind of text.
        what: &'static str,
        /// The text.
        text: String,
    },
    /// A name that peers refuse.
    #[error("the agent name {:?} contains a control character; use printable characters only", .name.as_str())]
    ControlCharacter {
        /// The name.
        name: AgentName,
    },
    /// Another agent of this process has the name.
    #[error(
        "this process already has an agent {name}; drop that agent and its registrations, or choose \
         another name"
    )]
    NameTaken {
        /// The name.
        name: AgentName,
    },
    /// A delay that NIXL cannot represent.
    #[error("the progress thread's delay of {seconds} s exceeds 2^64 µs; choose a shorter one")]
    DelayTooLong {
        /// The delay, in seconds.
        seconds: u64,
    },
    /// NIXL refused to create the agent.
    #[error("NIXL could not create agent {name}: {status}; see its log on standard error")]
    Agent {
        /// Its name.
        name: AgentName,
        /// The status that NIXL returned.
        status: Status,
    },
    /// A backend was named twice.
    #[error("backend {backend} is configured twice; configure it once")]
    DuplicateBackend {
        /// The backend.
        backend: BackendName,
    },
    /// Two backends that one agent cannot have together.
    #[error("an agent cannot have both {first} and {second}; choose one of them")]
    IllegalCombination {
        /// One of them.
        first: BackendName,
        /// The other.
        second: BackendName,
    },
    /// NIXL finds no plugin of this name.
    #[error("NIXL has no plugin {backend}; choose one of {}, or install the plugin", list(.available, "none"))]
    UnknownPlugin {
        /// The backend.
        backend: BackendName,
        /// The plugins that it finds.
        available: Vec<BackendName>,
    },
    /// The plugin exists but does not work.
    #[error("the plugin of backend {backend} cannot be used; see the cause")]
    Plugin {
        /// The backend.
        backend: BackendName,
        /// The plugin's error.
        #[source]
        source: PluginError,
    },
    /// NIXL has a plugin, but refuses it.
    #[error("NIXL refused the plugin of backend {backend}; see its log on standard error")]
    PluginRefused {
        /// The backend.
        backend: BackendName,
    },
    /// A parameter that the backend does not know, and would ignore.
    #[error(
        "backend {backend} has no parameter {parameter}; choose one of {}, or use \
         `unchecked_parameter`",
        list(.known, "none")
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
        "NIXL could not create backend {backend}: {status}; check its parameters, and see NIXL's log on \
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
        "the engine's thread could not be started; raise the limit on threads or on memory, or create \
         fewer engines"
    )]
    Thread {
        /// The system's error.
        #[source]
        source: OsError,
    },
    /// A backend that the agent does not have.
    #[error("agent {agent} has no backend {backend}; choose one of {}", list(.available, "none"))]
    NoSuchBackend {
        /// The agent.
        agent: AgentName,
        /// The backend.
        backend: BackendName,
        /// The backends that it has.
        available: Vec<BackendName>,
    },
    /// The agent does not know the peer, or has forgotten it.
    #[error("agent {agent} does not know peer {peer}; import one of its layouts")]
    UnknownPeer {
        /// The agent.
        agent: AgentName,
        /// The peer.
        peer: PeerId,
    },
    /// The connection to the peer has broken.
    #[error(
        "agent {agent} lost its connection to peer {peer}; import one of its layouts again, or a new \
         export if the peer was restarted"
    )]
    PeerLost {
        /// The agent.
        agent: AgentName,
        /// The peer.
        peer: AgentName,
    },
    /// A query to the library failed.
    #[error("{operation} failed: {status}; see NIXL's log on standard error")]
    Call {
        /// The query.
        operation: &'static str,
        /// The status that NIXL returned.
        status: Status,
    },
    /// An environment variable with an invalid value.
    #[error("{name}={value:?} is invalid; set it to {expected}")]
    InvalidVariable {
        /// The variable.
        name: String,
        /// Its value.
        value: String,
        /// The expected values.
        expected: &'static str,
    },
    /// An environment variable with the settings' prefix that is not a setting.
    #[error("{name} is not a setting; correct its name, or unset it")]
    UnknownVariable {
        /// The variable.
        name: String,
    },
    /// An environment variable for a backend that is not requested.
    #[error(
        "{name} configures backend {backend}, which TERRANE_NIXL_BACKENDS does not list; add it there, or \
         unset {name}"
    )]
    VariableWithoutBackend {
        /// The variable.
        name: String,
        /// The backend.
        backend: BackendName,
    },
}

impl NixlError {
    /// Converts an error of the bindings in a query that should not fail.
    pub(crate) fn during(
        operation: &'static str,
    ) -> impl FnOnce(nixl_sys::NixlError) -> Self + Copy {
        move |error| Self::Call { operation, status: Status::of(&error) }
    }
}

/// The names, or `none` if there are none.
pub(crate) fn list<N: Display>(names: &[N], none: &str) -> String {
    if names.is_empty() {
        return none.to_owned();
    }
    names.iter().map(N::to_string).collect::<Vec<_>>().join(", ")
}
