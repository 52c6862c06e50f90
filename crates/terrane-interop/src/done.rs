//! When a consumer has done with memory, which is not always when it says so.

use terrane_cuda::Stream;

/// When the consumer of an Arrow array has done with its memory.
///
/// On the host that is when it releases the array. What a device was given to do may still run then:
/// libraries drop an array as soon as they have submitted their work.
#[derive(Debug, Default)]
pub enum Done {
    /// When it releases the array: it waits for its own work, or has none on a device.
    #[default]
    AtRelease,
    /// When this stream has run all that it was given until the release, for which the thread that
    /// releases the array waits. It cannot be the default stream of a thread, which is another one
    /// on each.
    After(Stream),
}

/// Whether it is the default stream of whatever thread asks: waited for on another thread than the
/// consumer's, it is another stream.
pub(crate) fn is_of_thread(stream: &Stream) -> bool {
    // CU_STREAM_PER_THREAD
    stream.handle().addr() == 2
}

/// Lets go of what a consumer had, when its stream, if there is one, has run.
///
/// If the stream cannot be waited for (it is being captured, say), nobody knows when it has run, so
/// that all of it is kept for ever, and counted where failed drops are.
pub(crate) fn let_go<T: Send + 'static>(consumer: Option<&Stream>, kept: T) {
    match consumer.map(|stream| (stream, stream.synchronize())) {
        // A context that is lost runs nothing any more, so that there is nothing to wait for.
        Some((stream, Err(error))) if !error.is_device_lost() => {
            stream.context().keep_for_ever(kept, &error);
        }
        _ => drop(kept),
    }
}
