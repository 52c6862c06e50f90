//! When a consumer has finished with an array's memory.

use terrane_cuda::Stream;

/// When the consumer of an Arrow array has finished with its memory.
///
/// On the host this is when it releases the array. Work of a device may still run then: libraries drop
/// an array as soon as they have submitted their work.
#[derive(Debug, Default)]
pub enum Done {
    /// At the release: the consumer waits for its own work, or has none on a device.
    #[default]
    AtRelease,
    /// When this stream has run all work that it had at the release. The thread that releases the array
    /// waits for it.
    After(Stream),
}
