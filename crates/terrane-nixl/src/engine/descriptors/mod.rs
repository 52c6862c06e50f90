//! The descriptors of requests: listed from a plan's runs, or prepared once per endpoint.

pub(super) mod chunk;
pub(super) mod piece_index;
pub(super) mod prepared;
pub(super) mod region_bases;
