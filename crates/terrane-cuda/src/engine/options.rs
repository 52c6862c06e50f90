//! What an engine can be told, and the ways in which it copies.

use std::fmt;
use std::num::NonZeroU32;

use terrane_core::{ByteCount, Wish};

use super::calibration::Calibration;
use crate::stream::StreamPriority;

/// A way to copy blocks. Which one a transfer takes is decided by a [`Calibration`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum CopyPath {
    /// A request to the device's copy engines for each run, where runs are few and long.
    Contiguous,
    /// The same where they are not: what everything else is measured against.
    CopyEach,
    /// Many runs in one call of the driver, where it has such a call.
    Batched,
    /// A kernel that reads or writes pinned memory in place.
    Direct,
    /// A kernel that gathers blocks in a buffer on the device, which then travel as few long
    /// requests; or the other way round.
    Staged,
    /// A kernel on all multiprocessors, within the device's memory.
    Relayout,
    /// A kernel that reads or writes the memory of another device in place.
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

    /// The path as explanations name it.
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

    /// The path of a [name](Self::name).
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
/// Those that bound one piece of work keep a transfer from holding up the device's other work: a
/// kernel or a request that has begun is not interrupted.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceEngineOptions {
    /// Take this path for every transfer that it can copy, whatever another would cost. For tests
    /// and measurements; what it cannot copy is declined.
    pub path: Option<CopyPath>,
    /// What the paths cost on this device. By default the figures of an H200.
    pub calibration: Option<Calibration>,
    /// Whether to copy by kernels. Without them, as where the driver is too old for them or the
    /// device is, everything goes by the driver's copies, which are slower for short pieces.
    pub kernels: Wish,
    /// How large one buffer of the staged path is.
    pub scratch_bytes: ByteCount,
    /// How many such buffers each direction has, 2 at least. They are allocated when a transfer
    /// first needs them, and kept.
    pub scratch_buffers: NonZeroU32,
    /// Thread blocks of a kernel that packs or unpacks a buffer.
    pub pack_ctas: NonZeroU32,
    /// Thread blocks of a kernel that reads or writes pinned memory. As many as it takes to fill
    /// the wire, and no more, as each takes up a multiprocessor for as long.
    pub direct_ctas: NonZeroU32,
    /// Thread blocks of a kernel that reads or writes another device's memory. Over NVLink, 48 reach
    /// the rate of a kernel on all multiprocessors where they read, and 0.96 of it where they write.
    pub peer_ctas: NonZeroU32,
    /// Thread blocks of a kernel within the device's memory; `None` for as many as it has work for.
    /// That is fastest, as the device hands the work out in order, and another kernel's thread
    /// blocks come between whenever some of these end, which is every few microseconds.
    pub relayout_ctas: Option<NonZeroU32>,
    /// The most bytes that one request, or one kernel that uses the wire, copies.
    pub request_bytes: ByteCount,
    /// The most bytes that one kernel within the device's memory copies: a gigabyte takes half a
    /// millisecond, and the step from one kernel to the next some microseconds.
    pub relayout_bytes: ByteCount,
    /// How the engine's streams rank against others.
    pub priority: StreamPriority,
    /// How many streams there are at most. Transfers beyond share them.
    pub streams: NonZeroU32,
    /// How many threads wait for transfers to end. While as many transfers are on the device, one
    /// of the threads looks after what they have no time for, every 100 µs, rather than sleep.
    pub watchers: NonZeroU32,
    /// Whether what transfers took corrects the calibration, within a quarter. Transfers between
    /// devices do not.
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
    /// Three buffers of 32 MiB in each direction, 24 thread blocks to pack, 32 for what uses the
    /// bus to the host, 48 for what uses the one to another device, requests of at most 32 MiB:
    /// measured on an H200.
    fn default() -> Self {
        Self {
            path: None,
            calibration: None,
            kernels: Wish::Preferred,
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
