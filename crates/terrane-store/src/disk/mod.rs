//! The crash-safe metadata of a disk tier: which block is in which slot.
//!
//! A [`Catalog`] keeps a journal of records, checkpoints that replace it, and two superblocks. It
//! survives a crash at any point, torn writes, and changes of names in any order. It never reads or
//! writes payloads: their checksums are in the records and decide at each read.
//!
//! The files, their bytes and the rules of recovery are in `docs/store-format.md`.

mod catalog;
mod error;
mod files;
mod format;
mod inspect;
mod live;
mod recovery;
mod stripes;

pub(crate) use catalog::acquire_striped;
pub use catalog::snapshot::CatalogSnapshot;
pub(crate) use catalog::superblocks::random_secret;
pub use catalog::write_checkpoint::{CheckpointReport, CheckpointWriter};
pub use catalog::{Catalog, CatalogOptions};
pub use error::{CatalogError, FieldDifference, FoundStripe, ReadOnlyReason};
pub use files::directory::Directory;
pub use files::owner::StoreOwner;
pub use files::{DirectoryLock, Files, OpenFile, OpenMode};
pub(crate) use format::namespace::MOST_GROUPS;
pub use format::namespace::{GroupSlots, Namespace};
pub use format::record::PutRecord;
pub use format::superblock::FORMAT_VERSION;
pub(crate) use inspect::{Inspected, inspect, placement};
pub use live::{LiveRecord, LiveRecords, Recovered};
pub(crate) use stripes::Placement;
pub use stripes::Stripes;
