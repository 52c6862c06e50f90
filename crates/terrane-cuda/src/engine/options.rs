//! The options of an engine, and its ways to copy.

use std::fmt;
use std::num::NonZeroU32;

use terrane_core::{ByteCount, Requirement};

use super::calibration::Calibration;
use crate::stream::StreamPriority;

/// A way to copy blocks. A [`Calibration`] decides which one a transfer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum CopyPath {
    /// One request to the device's copy engines per run, if runs are few and long.
    Contiguous,
    /// The same if runs are not few and long. All other paths are measured against this one.
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

    /// Returns the path with a [name](Self::name).
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|path| path.name() == name)
    }
}

impl fmt::Display for CopyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The options of a [`DeviceEngine`](super::DeviceEngine).
///
/// Some options limit one piece of work. They keep a transfer from delaying the device's other
/// work: a kernel or a request that has begun is not interrupted.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceEngineOptions {
    /// Takes this path for every transfer that it can copy, whatever another path would cost. For
    /// tests and measurements. The engine declines transfers that the path cannot copy.
    pub path: Option<CopyPath>,
    /// The costs of the paths on this device. The default is the figures of an H200.
    pub calibration: Option<Calibration>,
    /// Whether to copy with kernels. Without them, all transfers use the driver's copies, which are
    /// slower for short pieces. The same applies if the driver or the device is too old for
    /// kernels.
    pub kernels: Requirement,
    /// The size of one buffer of the staged path.
    pub scratch_bytes: ByteCount,
    /// The number of such buffers per direction, at least 2. They are allocated when a transfer
    /// first needs them, and kept.
    pub scratch_buffers: NonZeroU32,
    /// Thread blocks of a kernel that packs or unpacks a buffer.
    pub pack_ctas: NonZeroU32,
    /// Thread blocks of a kernel that reads or writes pinned memory. Use just enough to fill the
    /// wire, because each block occupies a multiprocessor for that time.
    pub direct_ctas: NonZeroU32,
    /// Thread blocks of a kernel that reads or writes another device's memory. Over NVLink, 48
    /// blocks reach the rate of a kernel on all multiprocessors for reads, and 0.96 of it for
    /// writes.
    pub peer_ctas: NonZeroU32,
    /// Thread blocks of a kernel within the device's memory; `None` for as many as there is work
    /// for. `None` is fastest, because the device hands out the work in order. Another kernel's
    /// thread blocks run whenever some of these end, which is every few microseconds.
    pub relayout_ctas: Option<NonZeroU32>,
    /// The maximum number of bytes that one request, or one kernel that uses the wire, copies.
    pub request_bytes: ByteCount,
    /// The maximum number of bytes that one kernel within the device's memory copies. A gigabyte
    /// takes half a millisecond, and the step from one kernel to the next takes some microseconds.
    pub relayout_bytes: ByteCount,
    /// The priority of the engine's streams.
    pub priority: StreamPriority,
    /// The maximum number of streams. Further transfers share them.
    pub streams: NonZeroU32,
    /// The number of threads that wait for transfers to end. If more transfers than that are on the
    /// device, one thread polls the remaining ones every 100 µs instead of sleeping.
    pub watchers: NonZeroU32,
    /// Whether measured transfer times correct the calibration, by at most a quarter. Transfers
    /// between devices do not correct it.
    pub learns: bool,
}

/// A number that is not zero.
const fn number(number: u32) -> NonZeroU32 {
    match NonZeroU32::new(number) {
        Some(number) => number,
        None => NonZeroU32::MIN,
    }
}

impl Default for DeviceEngineOptions {
    /// Three buffers of 32 MiB in each direction; 24 thread blocks to pack, 32 for the bus to the
    /// host, and 48 for the bus to another device; requests of at most 32 MiB. The figures were
    /// measured on an H200.
    fn default() -> Self {
        Self {
            path: None,
            calibration: None,
            kernels: Requirement::Preferred,
            scratch_bytes: ByteCount::mib(32),
            scratch_buffers: number(3),
            pack_ctas: number(24),
            direct_ctas: number(32),
            peer_ctas: number(48),
            relayout_ctas: None,
            request_bytes: ByteCount::mib(32),
            relayout_bytes: ByteCount::gib(1),
            priority: StreamPriority::Default,
            streams: number(24),
            watchers: number(4),
            learns: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found_again() {
        for path in CopyPath::ALL {
            assert_eq!(CopyPath::from_name(path.name()), Some(path));
        }
        assert_eq!(CopyPath::from_name("teleported"), None);
    }
}
