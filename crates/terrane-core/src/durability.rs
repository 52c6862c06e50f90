//! What survives a crash of the machine.

/// What is true of a file's bytes once a write to them has completed.
///
/// A file states one for every write to it ([`FileHandle`](crate::FileHandle)), and a transfer can
/// ask for more for itself; the stricter of the two counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Durability {
    /// The bytes are with the file system, visible to every reader; a crash of the machine may
    /// lose them. Right for scratch.
    #[default]
    None,
    /// The bytes survive a crash of the machine (`fdatasync`).
    Data,
    /// The bytes and the file's metadata survive a crash of the machine (`fsync`). A file created
    /// under it is on the device, with its name in the directory, before it is handed out.
    Full,
}
