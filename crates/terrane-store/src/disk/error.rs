//! The errors of the catalog.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use terrane_core::{ForkedProcess, OsError};

use crate::disk::files::owner::StoreOwner;

/// The remedy if directories of a striped store are missing or wrong.
const STRIPES_REMEDY: &str = "mount all its drives, and pass all directories of the store in their \
     order; if a drive is lost, remove the store's folders in the other directories to begin with an \
     empty store";

/// An error of a [`Catalog`](super::Catalog).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CatalogError {
    /// The name of a namespace cannot be the name of a folder.
    #[error(
        "the namespace name {name:?} is not usable as a folder: {problem}; use 1 to {longest} of the \
         characters a-z, A-Z, 0-9, '-', '_', '.' and '=', not beginning with '.'"
    )]
    NamespaceName {
        /// The name.
        name: String,
        /// The rule that it breaks.
        problem: String,
        /// The maximum length in bytes.
        longest: usize,
    },
    /// A field of a namespace is named twice, has no name, or is too long.
    #[error(
        "the namespace field {name:?} {problem}; use names of 1 to {longest_name} bytes and values of \
         up to {longest_value} bytes, each name once"
    )]
    NamespaceField {
        /// The name of the field.
        name: String,
        /// The rule that it breaks.
        problem: &'static str,
        /// The maximum length of a name in bytes.
        longest_name: usize,
        /// The maximum length of a value in bytes.
        longest_value: usize,
    },
    /// The namespace and the groups do not fit in a superblock.
    #[error(
        "the namespace and its {groups} groups need {needed} bytes and a superblock has {limit}; use \
         fewer or shorter fields"
    )]
    NamespaceTooLong {
        /// The number of groups.
        groups: usize,
        /// The bytes that they need.
        needed: usize,
        /// The bytes that a superblock has for them.
        limit: usize,
    },
    /// The store has too many groups, or was created with too many by an older build.
    #[error(
        "the store has {groups} groups and the limit is {limit}; use fewer groups, in another namespace \
         or directory if the store exists"
    )]
    TooManyGroups {
        /// The number of groups.
        groups: usize,
        /// The maximum number.
        limit: usize,
    },
    /// The slots of a group are too large, or an older build created the store with such slots.
    #[error(
        "group {group} has slots of {slot_bytes} bytes and the limit is {limit}; split its blocks, in \
         another namespace or directory if the store exists"
    )]
    SlotTooLarge {
        /// The index of the group.
        group: usize,
        /// The bytes of a slot.
        slot_bytes: u64,
        /// The maximum number of bytes.
        limit: u64,
    },
    /// A group has no slots or slots of no bytes.
    #[error("group {group} has {slots} slots of {slot_bytes} bytes; both must be at least 1")]
    EmptyGroup {
        /// The index of the group.
        group: usize,
        /// Its number of slots.
        slots: u32,
        /// The bytes of a slot.
        slot_bytes: u64,
    },
    /// The directory does not exist.
    #[error("the directory {path:?} does not exist; create it first")]
    NotFound {
        /// The path.
        path: PathBuf,
    },
    /// A path names something other than a directory.
    #[error("{path:?} is not a directory; choose another path")]
    NotADirectory {
        /// The path.
        path: PathBuf,
    },
    /// Other users can read the directory, and this process cannot change that.
    #[error(
        "the directory {path:?} has mode {mode:o} and must have 700, because its files show what was \
         cached; its owner can change that with chmod"
    )]
    NotPrivate {
        /// The path.
        path: PathBuf,
        /// The permission bits.
        mode: u32,
    },
    /// Another user owns the directory. That user can read and replace its files.
    ///
    /// Some file systems give files a fixed owner. There, a directory with the owner of a new file of this
    /// process is not refused.
    #[error(
        "the directory {path:?} belongs to user {owner}; this process runs as user {user}, and its new \
         files there do not belong to user {owner}; run it as user {owner}, give the directory and its \
         files to user {user} with chown, or use another directory"
    )]
    OtherUser {
        /// The path.
        path: PathBuf,
        /// The id of its owner.
        owner: u32,
        /// The effective user id of this process.
        user: u32,
    },
    /// The process may not access a file or directory.
    #[error("{file:?} is not accessible; check its permissions, its owner and the mount")]
    NotPermitted {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        #[source]
        source: OsError,
    },
    /// The file system, a quota or a limit on file sizes is exhausted.
    #[error("there is no space for {file:?}; free space, or raise the quota or RLIMIT_FSIZE")]
    NoSpace {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        #[source]
        source: OsError,
    },
    /// Another call on a file failed.
    #[error("a call on {file:?} failed; check the device and the kernel's log")]
    Io {
        /// The file.
        file: PathBuf,
        /// The error of the system.
        #[source]
        source: OsError,
    },
    /// Another process, or another catalog of this process, owns the directory.
    #[error(
        "{directory:?} is owned by {}; close that store first, or use another directory",
        .owner.as_ref().map_or("a process that did not leave its name".into(), ToString::to_string)
    )]
    Owned {
        /// The directory.
        directory: PathBuf,
        /// The owner, if it is known.
        owner: Option<StoreOwner>,
    },
    /// Neither superblock is valid, and the directory has data.
    #[error(
        "both superblocks of {directory:?} are damaged and {file:?} exists; remove the directory to \
         begin with an empty store"
    )]
    SuperblockDamaged {
        /// The directory.
        directory: PathBuf,
        /// A file that shows that the directory has data.
        file: String,
    },
    /// A superblock holds the bytes of something else.
    #[error("{file:?} is not a superblock of a store; use another directory, or remove the file")]
    ForeignSuperblock {
        /// The file.
        file: PathBuf,
    },
    /// The store has another version of the format.
    #[error(
        "{file:?} has format version {found} and this library reads version {supported}; use the \
         library that wrote it, or remove the directory"
    )]
    UnsupportedVersion {
        /// The file.
        file: PathBuf,
        /// The version of the file.
        found: u32,
        /// The version of this library.
        supported: u32,
    },
    /// The store belongs to another namespace.
    #[error(
        "the store in {directory:?} has another namespace: {}; open it with its own namespace, or \
         use another name",
        .differences.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    )]
    NamespaceDiffers {
        /// The directory.
        directory: PathBuf,
        /// The fields that differ.
        differences: Vec<FieldDifference>,
    },
    /// The tier has another number of directories than the store.
    #[error(
        "the store in {:?} has {recorded} directories and {} were passed: {passed:?}; {STRIPES_REMEDY}",
        .passed.first().cloned().unwrap_or_default(), .passed.len()
    )]
    DirectoryCount {
        /// The number of directories that the store records.
        recorded: u32,
        /// The folders that were passed.
        passed: Vec<PathBuf>,
    },
    /// A directory of the tier is not the one of the store.
    #[error(
        "{directory:?} was passed as directory {index} of the store in {first:?}, and {found}; \
         {STRIPES_REMEDY}"
    )]
    StripeDiffers {
        /// The folder of the first directory.
        first: PathBuf,
        /// The folder that was passed.
        directory: PathBuf,
        /// Its index among the directories that were passed, from 0.
        index: u32,
        /// The content of the folder.
        found: FoundStripe,
    },
    /// The slots of the store have another alignment.
    #[error(
        "the slots of the store in {directory:?} are aligned to {recorded} bytes and {requested} were \
         requested; open it again, or remove its folders to begin with an empty store"
    )]
    SlotAlignmentDiffers {
        /// The folder of the store.
        directory: PathBuf,
        /// The alignment that the store records.
        recorded: u32,
        /// The requested alignment; 0 if it is none that can be recorded.
        requested: u32,
    },
    /// A file is too long to be one of a catalog.
    #[error("{file:?} has {length} bytes and the limit is {limit}; it is damaged, remove it")]
    FileTooLong {
        /// The file.
        file: PathBuf,
        /// Its length in bytes.
        length: u64,
        /// The maximum length in bytes.
        limit: u64,
    },
    /// A key is too long.
    #[error("a key has {length} bytes and the limit is {limit}; use a hash of it as the key")]
    KeyTooLong {
        /// The length of the key in bytes.
        length: usize,
        /// The maximum length in bytes.
        limit: usize,
    },
    /// A record names a group that the catalog does not have.
    #[error("a record names group {group}; the catalog has {groups} groups, numbered from 0")]
    NoSuchGroup {
        /// The index of the group.
        group: u16,
        /// The number of groups.
        groups: usize,
    },
    /// A record names a slot that its group does not have.
    #[error(
        "a record names slot {slot} of group {group}, which has {slots} slots, numbered from 0; \
         name one of them"
    )]
    NoSuchSlot {
        /// The index of the group.
        group: u16,
        /// The slot.
        slot: u32,
        /// The number of slots.
        slots: u32,
    },
    /// A payload is longer than its slot.
    #[error(
        "a record of group {group} has {length} bytes of payload and a slot has {limit}; split the \
         payload, or open the store with larger blocks"
    )]
    PayloadTooLong {
        /// The index of the group.
        group: u16,
        /// The bytes of the payload.
        length: u64,
        /// The bytes of a slot.
        limit: u64,
    },
    /// The catalog no longer writes.
    #[error(
        "the catalog is read-only since a write failed; blocks stay readable; correct the cause and \
         open the store again"
    )]
    ReadOnly {
        /// Why it no longer writes.
        #[source]
        reason: Arc<ReadOnlyReason>,
    },
    /// The store was cleared while a checkpoint was written.
    #[error("the store was cleared during a checkpoint; the checkpoint is not needed any more")]
    CheckpointAbandoned,
    /// All sequence numbers are used.
    #[error("all sequence numbers of the store are used; remove the directory")]
    SequencesExhausted,
    /// All numbers of journals and checkpoints are used.
    #[error("a file of the store has the highest number below {limit}; remove the directory")]
    NumbersExhausted {
        /// All numbers are lower.
        limit: u64,
    },
    /// This process was forked while a thread of its parent opened, closed or looked for a store. That
    /// thread does not exist here, and what it had locked stays locked. The parent is not affected.
    #[error(
        "this process was forked while its parent opened or closed a store, so that it cannot use \
         stores; fork before that or after it, or use exec"
    )]
    ForkedDuringOpen,
    /// The catalog belongs to the process that this one was forked from.
    #[error(transparent)]
    Forked(#[from] ForkedProcess),
}

/// The content of a folder that was passed as a directory of a striped store.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FoundStripe {
    /// It does not exist.
    Missing,
    /// It has no file of the store.
    Nothing,
    /// It is another directory of the store.
    SameStore {
        /// Its index in the store, from 0.
        index: u32,
    },
    /// It is a directory of another store.
    OtherStore {
        /// Its index in that store, from 0.
        index: u32,
    },
    /// It is a directory of a store, and the first directory has no store. That one may be missing.
    NotInFirst {
        /// Its index in that store, from 0.
        index: u32,
    },
    /// The file that names the store is damaged.
    Damaged {
        /// The file.
        file: String,
    },
}

impl fmt::Display for FoundStripe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "it does not exist"),
            Self::Nothing => write!(f, "it has no file of that store"),
            Self::SameStore { index } => write!(f, "it is directory {index} of that store"),
            Self::OtherStore { index } => write!(f, "it is directory {index} of another store"),
            Self::NotInFirst { index } => {
                write!(f, "it is directory {index} of a store that is not in the first directory")
            }
            Self::Damaged { file } => write!(f, "its file {file:?} is damaged"),
        }
    }
}

/// Why a catalog no longer writes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{operation} failed on {file:?}")]
pub struct ReadOnlyReason {
    /// The operation that failed.
    pub operation: &'static str,
    /// The file.
    pub file: PathBuf,
    /// The error of the system.
    #[source]
    pub source: OsError,
}

/// A field in which a store differs from what its opener requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldDifference {
    /// The name of the field: `folder`, `groups`, `group 0: slot bytes`, or a field of the namespace.
    pub field: String,
    /// The value in the store, if it has the field.
    pub stored: Option<String>,
    /// The requested value, if there is one.
    pub requested: Option<String>,
}

impl fmt::Display for FieldDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, stored, requested } = self;
        match (stored, requested) {
            (Some(stored), Some(requested)) => {
                write!(f, "{field} is {stored:?} in the store and {requested:?} was requested")
            }
            (Some(stored), None) => {
                write!(f, "{field} is {stored:?} in the store and was not given")
            }
            (None, Some(requested)) => {
                write!(f, "{field} is not in the store and {requested:?} was given")
            }
            (None, None) => write!(f, "{field}"),
        }
    }
}
