//! The crash-safe metadata of a disk tier: which block is in which slot.
//!
//! A [`Catalog`] keeps a journal of records, checkpoints that replace it, and two superblocks. It
//! survives a crash at any point, torn writes, and changes of names in any order. It never reads or
//! writes payloads: their checksums are in the records and decide at each read.
//!
//! The files, their bytes and the rules of recovery are in `docs/store-format.md`.

mod bytes;
mod catalog;
mod checkpoint;
mod directory;
mod error;
mod files;
mod folder;
mod inspect;
mod journal;
mod live;
mod lock;
mod names;
mod namespace;
mod owner;
mod record;
mod recovery;
mod snapshot;
mod state;
mod stripes;
mod superblock;
mod superblocks;
mod write_checkpoint;

pub(crate) use catalog::acquire_striped;
pub use catalog::{Catalog, CatalogOptions};
pub use directory::Directory;
pub use error::{CatalogError, FieldDifference, FoundStripe, ReadOnlyReason};
pub use files::{DirectoryLock, Files, OpenFile, OpenMode};
pub(crate) use inspect::{Inspected, inspect, placement};
pub use live::{LiveRecord, LiveRecords, Recovered};
pub(crate) use namespace::MOST_GROUPS;
pub use namespace::{GroupSlots, Namespace};
pub use owner::StoreOwner;
pub use record::PutRecord;
pub use snapshot::CatalogSnapshot;
pub(crate) use stripes::Placement;
pub use stripes::Stripes;
pub use superblock::FORMAT_VERSION;
pub(crate) use superblocks::random_secret;
pub use write_checkpoint::{CheckpointReport, CheckpointWriter};
