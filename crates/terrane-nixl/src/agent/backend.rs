//! The backends of an agent.

use std::sync::Arc;

use terrane_core::BackendName;

use super::config::{BackendRequirement, FileAccess};
use super::io_limit::IoLimit;
use super::options::BackendOptions;
use crate::bindings::memory_type::MemoryType;

/// A backend of an agent.
#[derive(Debug)]
pub(crate) struct Backend {
    pub(crate) name: BackendName,
    pub(crate) raw: nixl_sys::Backend,
    pub(super) options: BackendOptions,
    /// The memory types that the backend supports.
    pub(crate) memory: Vec<MemoryType>,
    pub(crate) requirement: BackendRequirement,
    pub(crate) file_access: FileAccess,
    /// The maximum number of I/Os in flight; `None` if no limit is known.
    pub(crate) ios: Option<Arc<IoLimit>>,
    /// Whether all I/Os of a request have ended when the backend reports its failure.
    pub(crate) failure_is_final: bool,
}

impl Backend {
    /// Options that name only this backend.
    pub(crate) fn options(&self) -> &nixl_sys::OptArgs {
        &self.options.0
    }
}
