//! The native module of the Python package `terrane_kv`.
//!
//! Every call that may wait releases the GIL. Memory that a job uses stays referenced until the job ends:
//! `memory::KeptObjects` is the guard of each job. At interpreter exit, open stores are closed before Python frees any
//! object.

mod cache;
mod command;
mod device;
mod errors;
mod events;
mod interpreter;
mod jobs;
mod keys;
mod manager;
mod memory;
mod numbers;
mod open;
mod options;
mod outcome;
mod pages;
mod process;
mod queue;
mod snapshot;
mod store;
mod streams;
mod tensors;
mod tier;
mod torch;
mod views;

#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::cache::KvCache;
    #[pymodule_export]
    use super::command::{checksum, plan_json, run_command};
    #[pymodule_export]
    use super::errors::{
        ClosedError, ForkedError, InUseError, NamespaceError, QueueFullError, StoreError,
    };
    #[pymodule_export]
    use super::events::Events;
    #[pymodule_export]
    use super::manager::{Copied, Manager, Transfer};
    #[pymodule_export]
    use super::memory::{Blocks, Region};
    #[pymodule_export]
    use super::outcome::{Job, Outcome};
    #[pymodule_export]
    use super::queue::CompletionQueue;
    #[pymodule_export]
    use super::store::Store;
    #[pymodule_export]
    use super::tier::Tier;
    #[pymodule_export]
    use super::views::KvTensor;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        super::interpreter::check(module.py())?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        super::open::register(module)
    }
}
