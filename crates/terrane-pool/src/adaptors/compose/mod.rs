//! Adaptors that choose, combine or divide upstreams.

pub(crate) mod binning;
pub(crate) mod either;
pub(crate) mod erased;
pub(crate) mod fallback;
pub(crate) mod on_failure;
pub(crate) mod slabs;
