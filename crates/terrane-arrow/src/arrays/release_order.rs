//! The order between a consumer's work and the release of an array's memory.

use terrane_cuda::Stream;

/// When the consumer of an Arrow array has finished with its memory.
///
/// On the host, this is the release of the array. On a device, work may still run at that time,
/// because libraries drop an array as soon as they have submitted their work.
#[derive(Debug, Default)]
pub enum ReleaseOrder {
    /// At the release: the consumer waits for its own device work, or has none.
    #[default]
    AtRelease,
    /// When this stream has completed the work that was submitted to it before the release. The
    /// thread that releases the array waits for this work.
    After(Stream),
}
