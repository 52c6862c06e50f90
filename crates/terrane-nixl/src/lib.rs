//! NIXL as a Terrane backend: agents, backends, registration, metadata, and the remote copy engine.
//!
//! # Should I be using this crate?
//!
//! Use it to register KV-cache blocks of any tier with NIXL, and to move them between processes and
//! machines. It takes memory of all of Terrane's allocators, and what you adopt; in front of UCX,
//! POSIX, GDS or whichever other plugin NIXL finds.
//!
//! # What it does not do
//!
//! It links no NIXL and installs none: the library is looked for at run time, as `libnixl_capi.so`
//! where the loader looks. Without it, every entry point answers with a typed [`NixlUnavailable`];
//! none aborts the process, as NIXL's bindings do by themselves. Building the bindings takes
//! libclang and a C++ compiler.
//!
//! It does not let NIXL run without locks: see [`ThreadMode`]. And it does not show what NIXL writes
//! to its log: where NIXL answers "failed" and nothing else, the reason is on standard error, as
//! `NIXL_LOG_LEVEL` has it.
//!
//! # What there is
//!
//! - [`probe`] says what is missing, or where NIXL was [`Found`] and which [`Plugin`]s load, and why
//!   not the others.
//! - [`AgentBuilder`] makes an [`Agent`] with its backends, from code or from the
//!   [environment](AgentBuilder::from_env).
//! - An agent is a [`Register`](terrane_core::Register): memory that it registers is held as
//!   [`Registered`](terrane_core::Registered), and a layout registers its base allocation through
//!   the layout builder. What a backend is told, its [`Descriptor`], derives from the memory's
//!   location. The record says which backends accepted, and the [`Refusal`] of each other;
//!   [`BackendConfig::required`] and [`Agent::registrar`] say on which of them it depends.
//! - [`Agent::export`] describes a registered layout as bytes, and [`Agent::import`] makes a
//!   [`RemoteLayout`] of them at a peer.
//! - [`Agent::nixl_metadata`] and [`Agent::import_foreign`] do the same with peers that use NIXL
//!   without Terrane.
//! - [`NixlEngine`] copies between layouts here and there, and to files.
//!
//! # Who deregisters when
//!
//! A registration is in force until its [`Registered`](terrane_core::Registered) drops or gives the
//! memory back, and ends before the memory is released. It keeps the agent alive, so that agent,
//! layouts, views and transfers can drop in any order and on any thread. Two registrations of the
//! same bytes do not end each other.
//!
//! # Forked processes
//!
//! A process that was forked from one that had built an agent cannot use NIXL: what it asks of an
//! agent is an error ([`NixlError::Forked`], [`Refusal::Forked`]), and engines decline. Agents, engines,
//! registrations and layouts of its parent drop there without a call of NIXL; they stay what they are
//! in the parent. A parent that has only probed can be forked, and its children build agents.
//!
//! # Example
//!
//! A layout in system memory, registered with whatever there is on this machine.
//!
//! ```
//! use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
//! use terrane_nixl::{AgentBuilder, BackendConfig};
//! use terrane_storage::{SystemAllocator, SystemOptions};
//!
//! fn registered() -> Result<(), Box<dyn std::error::Error>> {
//!     let agent = AgentBuilder::unnamed()
//!         .backend(BackendConfig::new("UCX").required())
//!         .backend(BackendConfig::new("POSIX"))
//!         .build()?;
//!     let config = LayoutConfig::builder()
//!         .num_blocks(64)
//!         .num_layers(4)
//!         .outer_dim(2)
//!         .page_size(16)
//!         .inner_dim(1024)
//!         .element(ElementFormat::Width(2))
//!         .build()?;
//!     let layout = LayoutBuilder::new(config)
//!         .fully_contiguous()
//!         .allocate(&SystemAllocator::new(SystemOptions::default()))
//!         .register(&agent)
//!         .build()?;
//!     for registration in layout.registrations() {
//!         let accepted: Vec<_> = registration.record.accepted().collect();
//!         println!("{} with {accepted:?}", registration.record.span.length);
//!     }
//!     // The agent may go first.
//!     drop(agent);
//!     drop(layout);
//!     Ok(())
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! match terrane_nixl::probe() {
//!     Ok(found) => {
//!         println!("NIXL is {}", found.library().display());
//!         registered()?;
//!     }
//!     Err(reason) => println!("without NIXL: {reason}"),
//! }
//! # Ok(())
//! # }
//! ```

/// The code of the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod agent;
mod backend;
mod engine;
mod error;
mod notifications;
mod peers;
mod probe;
mod process;
mod quiet;
mod refusal;
mod register;

pub use agent::{Agent, AgentBuilder, ThreadMode};
pub use backend::{BackendConfig, Demand, FileAccess, MemoryType};
pub use engine::{NixlEngine, NixlEngineOptions, NixlStep, RequestFailed};
pub use error::{NixlError, NixlUnavailable, PluginFailed, Status};
pub use notifications::Notification;
pub use peers::{
    ExportError, ForeignLayout, ForgetError, Forgotten, ImportError, MalformedMetadata,
    NixlMetadata, PeerChange, RemoteLayout,
};
pub use probe::{Found, Plugin, REQUIRED_SYMBOLS, probe, probe_file};
pub use refusal::Refusal;
pub use register::{Descriptor, RegisteredAllocator, Registrar};
