//! Values for the two ends of a transfer, in NIXL's terms.

/// A value for the local memory and one for the target: a peer's memory, or a file.
///
/// NIXL's requests name a local side and a remote side, whichever of them is the source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LocalAndTarget<T> {
    pub(super) local: T,
    pub(super) target: T,
}
