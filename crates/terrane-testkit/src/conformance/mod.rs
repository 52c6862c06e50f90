//! The rules of each contract, for all implementations.
//!
//! Each suite uses a fixture, which describes a backend. Each rule is a function that panics with
//! the rule and the result. `check_…` runs all rules of a suite.

pub mod allocator;
pub mod copy_engine;
pub mod formats;
pub mod memory;
pub mod registrar;

pub use allocator::{AllocatorFixture, check_allocator};
pub use copy_engine::{EngineFixture, check_copy_engine};
pub use memory::check_memory;
pub use registrar::{RegistrarFixture, check_registrar};
