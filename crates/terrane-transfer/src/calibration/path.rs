//! The copy paths, and the directions. A calibration has a cost for each pair.
//!
//! Both enums are exhaustive: an engine in another crate must serve or decline each variant.

use std::fmt;

/// A method to copy blocks. A [`Calibration`](crate::calibration::Calibration) determines which
/// path copies a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CopyPath {
    /// One request to the device's copy engines per run, if runs are few and long.
    Contiguous,
    /// The same if runs are many or short. The times of all other paths are compared with this one.
    CopyEach,
    /// Many runs in one driver call, if the driver has such a call.
    Batched,
    /// A kernel that reads or writes pinned memory in place.
    Direct,
    /// A kernel that gathers blocks in a buffer on the device, which then travel as few long
    /// requests. In the other direction, a kernel scatters them.
    Staged,
    /// A kernel on all multiprocessors, within the device's memory.
    Relayout,
    /// A kernel that reads or writes another device's memory in place.
    Peer,
}

impl CopyPath {
    /// Every path.
    pub const ALL: [Self; 7] = [
        Self::Contiguous,
        Self::CopyEach,
        Self::Batched,
        Self::Direct,
        Self::Staged,
        Self::Relayout,
        Self::Peer,
    ];

    /// The path's name in explanations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous copies",
            Self::CopyEach => "a copy for each run",
            Self::Batched => "batched copies",
            Self::Direct => "direct kernel",
            Self::Staged => "staged",
            Self::Relayout => "relayout kernel",
            Self::Peer => "peer kernel",
        }
    }

    /// The path's index in [`ALL`](Self::ALL).
    #[must_use]
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for CopyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The direction of a transfer, as seen from the engine's device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    /// From pinned memory to the device.
    ToDevice,
    /// From the device to pinned memory.
    ToHost,
    /// Within the device's memory.
    WithinDevice,
    /// From the device to another one: this device writes the other device's memory.
    ToPeer,
    /// From another device to this one: this device reads the other device's memory.
    FromPeer,
}

impl Direction {
    /// Every direction.
    pub const ALL: [Self; 5] =
        [Self::ToDevice, Self::ToHost, Self::WithinDevice, Self::ToPeer, Self::FromPeer];

    /// The direction's index in [`ALL`](Self::ALL).
    #[must_use]
    #[inline]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether the other end is on another device.
    #[must_use]
    #[inline]
    pub const fn has_peer(self) -> bool {
        matches!(self, Self::ToPeer | Self::FromPeer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        for path in CopyPath::ALL {
            let named = CopyPath::ALL.into_iter().filter(|other| other.name() == path.name());
            assert_eq!(named.collect::<Vec<_>>(), [path]);
        }
    }

    #[test]
    fn every_path_has_a_place() {
        for (number, path) in CopyPath::ALL.into_iter().enumerate() {
            assert_eq!(path.index(), number);
        }
    }

    #[test]
    fn every_direction_has_a_place() {
        for (number, direction) in Direction::ALL.into_iter().enumerate() {
            assert_eq!(direction.index(), number);
        }
    }
}
