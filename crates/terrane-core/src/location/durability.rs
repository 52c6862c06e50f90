//! Which writes survive a crash of the machine.

/// The state of a file's bytes once a write to them has completed.
///
/// A file sets one for all its writes ([`FileHandle`](crate::FileHandle)). A transfer can request a
/// stricter one. The stricter of the two applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// The file system has the bytes, and every reader sees them. A crash of the machine may lose
    /// them. Use it for scratch files.
    #[default]
    None,
    /// The bytes survive a crash of the machine (`fdatasync`).
    Data,
    /// The bytes and the file's metadata survive a crash of the machine (`fsync`). A newly created
    /// file, with its name in the directory, is synced to the device before it is returned.
    Full,
}
