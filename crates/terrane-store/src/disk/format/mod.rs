//! The bytes of the files of a store.

pub(crate) mod bytes;
pub(crate) mod checkpoint;
pub(crate) mod journal;
pub(crate) mod names;
pub(crate) mod namespace;
pub(crate) mod record;
pub(crate) mod superblock;
