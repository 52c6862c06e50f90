//! Options for opening, allocating and syncing files.

use terrane_core::{Durability, Requirement};

/// Options for opening, allocating and syncing files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DiskOptions {
    /// Reads and writes that bypass the page cache.
    pub direct: Requirement,
    /// Reserves blocks when a file is created, so that later writes cannot run out of disk space.
    /// If this is not granted, the file is sparse. Only
    /// [`open_extended`](crate::DiskFile::open_extended) reserves blocks of existing files.
    pub preallocate: Requirement,
    /// A scratch file that never has a name (`O_TMPFILE`). Otherwise it is created as
    /// `.terrane-scratch-N` and unlinked at once. A process that is killed between the two leaves
    /// an empty file behind. The next scratch file in the directory removes it.
    pub unnamed: Requirement,
    /// The durability of writes. It applies to every transfer that writes to the file.
    pub durability: Durability,
    /// Refuses to open an existing file through a symbolic link. Links in the path of its directory
    /// are followed.
    pub refuse_links: bool,
}
