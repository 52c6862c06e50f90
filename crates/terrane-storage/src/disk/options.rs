//! How files are to be opened, filled and kept.

use terrane_core::{Durability, Wish};

/// How files are to be opened, filled and kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DiskOptions {
    /// Reads and writes around the page cache.
    pub direct: Wish,
    /// Blocks reserved when a file is made, so that the disk cannot run full in the middle of a
    /// write. Where refused, the file is sparse. Files that existed are left as they are.
    pub preallocate: Wish,
    /// A scratch file that never has a name (`O_TMPFILE`). Otherwise it is created as
    /// `.terrane-scratch-N` and unlinked at once. A process that is killed between the two leaves
    /// an empty file behind, which the next scratch file in the directory removes.
    pub unnamed: Wish,
    /// What survives a crash of the machine. Whoever writes to the file by a transfer is held to it.
    pub durability: Durability,
}
