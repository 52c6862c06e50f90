//! The NIXL boundary: agents, backends, registration, metadata, and the remote copy engine.

mod agent;
mod backend;
mod engine;
mod error;
mod notifications;
mod peers;
mod probe;
mod refusal;
mod register;

pub use agent::{Agent, AgentBuilder, ThreadMode};
pub use backend::{BackendConfig, Demand, FileAccess, MemoryType};
pub use engine::{NixlEngine, NixlEngineOptions, NixlStep, RequestFailed};
pub use error::{NixlError, NixlUnavailable, PluginFailed, Status};
pub use notifications::Notification;
pub use peers::{
    ExportError, ForgetError, Forgotten, ImportError, MalformedMetadata, PeerChange, RemoteLayout,
};
pub use probe::{Found, Plugin, REQUIRED_SYMBOLS, probe};
pub use refusal::Refusal;
pub use register::{Descriptor, RegisteredAllocator, Registrar};
