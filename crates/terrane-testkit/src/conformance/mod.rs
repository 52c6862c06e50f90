//! The rules that every implementation of a contract has to keep.
//!
//! Each suite takes a fixture, in which a backend describes itself; each rule is a function of
//! its own, which panics with what the contract says and what was found. `check_…` runs them all.

pub mod allocator;
pub mod copy_engine;
pub mod formats;
pub mod memory;
pub mod registrar;

pub use allocator::{AllocatorFixture, check_allocator};
pub use copy_engine::{EngineFixture, check_copy_engine};
pub use memory::check_memory;
pub use registrar::{RegistrarFixture, check_registrar};
