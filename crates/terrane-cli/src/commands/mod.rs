//! The commands, one module each.

pub(crate) mod bench;
pub(crate) mod doctor;
pub(crate) mod files;
pub(crate) mod layout;
pub(crate) mod model;
pub(crate) mod page;
pub(crate) mod plan;
pub(crate) mod sizes;
pub(crate) mod store;
pub(crate) mod top;
