//! The options of a device engine.

use std::num::NonZeroU32;

use terrane_core::{ByteCount, Requirement};
use terrane_transfer::calibration::Calibration;
use terrane_transfer::calibration::CopyPath;

use crate::runtime::stream::StreamPriority;

/// The options of a [`DeviceEngine`](super::DeviceEngine).
///
/// Some options limit one piece of work. They keep a transfer from delaying the device's other
/// work: a kernel or a request that has begun is not interrupted.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceEngineOptions {
    /// Copies every transfer by this path, whatever another path would cost. For tests and
    /// measurements. The engine declines transfers that the path cannot copy.
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
    /// Thread blocks of a kernel that packs or unpacks a buffer. A checksum kernel has the same
    /// number while a copy between the device and the host runs. After the transfer's last copy, a
    /// kernel has at most three times as many.
    pub pack_ctas: NonZeroU32,
    /// Thread blocks of a kernel that reads or writes pinned memory. Use just enough to fill the
    /// wire, because each block occupies a multiprocessor for that time.
    pub direct_ctas: NonZeroU32,
    /// Thread blocks of a kernel that reads or writes another device's memory. Over NVLink, 48
    /// blocks reach the rate of a kernel on all multiprocessors for reads, and 0.96 of it for
    /// writes.
    pub peer_ctas: NonZeroU32,
    /// The maximum number of thread blocks of a kernel within the device's memory. With `None`, a
    /// kernel has as many as it has work for. That is fastest, because the device then schedules
    /// the thread blocks in order. Thread blocks of other kernels start when some of these end,
    /// every few microseconds.
    ///
    /// The limit also applies to the checksum kernels of copies within the device, and between
    /// devices. Their thread blocks take about 60 µs.
    pub relayout_ctas: Option<NonZeroU32>,
    /// The maximum number of bytes that one request, or one kernel that uses the wire, copies.
    pub request_bytes: ByteCount,
    /// The maximum number of bytes that one kernel within the device's memory copies. A gigabyte
    /// takes half a millisecond, and the step from one kernel to the next takes some microseconds.
    /// A checksum kernel has the same limit, or one block, in every direction. With `pack_ctas`
    /// thread blocks, a gigabyte takes about five milliseconds.
    pub relayout_bytes: ByteCount,
    /// The priority of the engine's streams.
    pub priority: StreamPriority,
    /// The maximum number of streams that transfers copy on. Further transfers share them. Streams
    /// that only carry the order of a transfer do not count.
    pub streams: NonZeroU32,
    /// The number of threads that wait for transfers to end. If more transfers are in flight, one
    /// thread polls the remaining ones every 100 µs.
    pub completion_threads: NonZeroU32,
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
    /// Each direction has three buffers of 32 MiB. Packing uses 24 thread blocks, the bus to the host
    /// 32, and the bus to another device 48. A request has at most 32 MiB. The figures were measured
    /// on an H200.
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
            completion_threads: number(4),
            learns: true,
        }
    }
}
