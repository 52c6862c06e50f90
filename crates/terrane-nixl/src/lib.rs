//! NIXL as a Terrane backend: agents, backends, registration, metadata, and the remote copy engine.
//!
//! # Should I be using this crate?
//!
//! Use it to register KV-cache blocks of any tier with NIXL, and to move them between processes and
//! machines. It registers memory from all of Terrane's allocators and memory that you adopt. The
//! backends are UCX, POSIX, GDS and GDS_MT, and any other plugin of NIXL for host memory, device
//! memory or files. Plugins for object stores and block devices cannot be used.
//!
//! # Limits of this crate
//!
//! It neither links nor installs NIXL: it loads `libnixl_capi.so` at run time from the loader's
//! search path. Without the library, every entry point returns a typed [`NixlUnavailable`]. NIXL's
//! bindings alone would abort the process. Building the bindings needs libclang and a C++ compiler.
//!
//! NIXL takes one lock for every call on an agent. This crate does not forward NIXL's log. If NIXL
//! returns only "failed", the reason is on standard error, subject to `NIXL_LOG_LEVEL`.
//!
//! # Contents
//!
//! - [`probe`] returns the [`NixlInstallation`], or the missing part. It lists which [`Plugin`]s
//!   can be loaded, and the reasons for the others.
//! - [`AgentBuilder`] creates an [`Agent`] with its backends, from code or from the
//!   [environment](AgentBuilder::from_env).
//! - An agent is a [`Register`](terrane_core::Register), so memory that it registers becomes a
//!   [`Registered`](terrane_core::Registered). A layout registers its base allocation through the
//!   layout builder. The [`Descriptor`] passed to a backend derives from the memory's location. The
//!   record lists which backends accepted, and the [`Refusal`] of each other one.
//!   [`BackendConfig::required`] and [`Agent::registrar`] select which backends must accept.
//! - [`Agent::export`] describes a registered layout as bytes. [`Agent::import`] creates a
//!   [`RemoteLayout`] from them in another process.
//! - [`Agent::nixl_metadata`] and [`Agent::import_foreign`] do the same with peers that use NIXL
//!   without Terrane.
//! - [`NixlEngine`] copies between local layouts, remote layouts and files.
//!
//! # When a registration ends
//!
//! A registration is in force until its [`Registered`](terrane_core::Registered) drops or returns
//! the memory. It ends before the memory is released. It keeps the agent alive, so agent, layouts,
//! views and transfers can drop in any order and on any thread. Two registrations of the same bytes
//! do not end each other.
//!
//! A registration within a longer one of the same agent uses the longer one. NIXL then keeps the
//! longer one until both have dropped, and peers can reach all of it until then. A registration
//! around a shorter one is refused ([`Refusal::Overlap`]), because NIXL would not find all of its
//! bytes. Register the longer span first. Requests keep each registration that NIXL may use for
//! them, until they have ended.
//!
//! # Forked processes
//!
//! A process cannot use NIXL if it was forked from one that had built an agent. Calls on an agent
//! return an error ([`NixlError::Forked`], [`Refusal::Forked`]), and engines decline. The parent's
//! agents, engines, registrations and layouts drop in the child without a call to NIXL. They stay
//! valid in the parent. If the parent has only probed, its children can build agents.
//!
//! # Example
//!
//! A layout in system memory, registered with the backends that this machine has.
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
mod bindings;
mod engine;
mod error;
mod peers;
mod probe;
mod register;

pub use agent::Agent;
pub use agent::builder::AgentBuilder;
pub use agent::config::{BackendConfig, BackendRequirement, FileAccess};
pub use bindings::memory_type::MemoryType;
pub use bindings::status::Status;
pub use engine::NixlEngine;
pub use engine::add_nixl::AddNixl;
pub use engine::error::{NixlStep, RequestError};
pub use engine::options::NixlEngineOptions;
pub use error::{NixlError, NixlUnavailable, PluginError};
pub use peers::error::{ExportError, ForgetError, ImportError, PeerChange};
pub use peers::foreign::{ForeignLayout, NixlMetadata};
pub use peers::forget::ForgetOutcome;
pub use peers::metadata::MalformedMetadata;
pub use peers::notifications::Notification;
pub use peers::remote::RemoteLayout;
pub use probe::plugins::Plugin;
pub use probe::symbols::REQUIRED_SYMBOLS;
pub use probe::{NixlInstallation, probe, probe_file};
pub use register::allocator::RegisteredAllocator;
pub use register::descriptor::Descriptor;
pub use register::refusal::Refusal;
pub use register::registrar::Registrar;

// Crates whose types the public signatures name.
#[doc(no_inline)]
pub use terrane_core;
#[doc(no_inline)]
pub use terrane_layout;
#[doc(no_inline)]
pub use terrane_transfer;
#[doc(no_inline)]
pub use terrane_wire;
