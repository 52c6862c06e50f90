//! Releases memory that a consumer in another library used, in the right order and without
//! unwinding into the consumer's code.
//!
//! Foreign code calls the release callbacks of C interfaces on any thread, possibly before device
//! work has finished.

use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(feature = "cuda")]
use terrane_cuda::Stream;

/// Runs code that drops users' values, and catches their panics, because the caller is foreign
/// code, which cannot unwind. The panic's payload is leaked, because its drop may panic too.
pub fn catch_panic(drops: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(drops)) {
        let _leaked = ManuallyDrop::new(payload);
    }
}

/// Drops a consumer's value after the stream, if any, has completed. The calling thread waits.
///
/// If the stream cannot be waited for (while it is captured, for example), its end is unknown.
/// The value is then kept until the process ends, and the stream's context counts one of its
/// [`failed_drops`](terrane_cuda::Context::failed_drops).
#[cfg(feature = "cuda")]
pub fn release_after<T: Send + 'static>(consumer: Option<&Stream>, value: T) {
    match consumer.map(|stream| (stream, stream.synchronize())) {
        // A lost context runs no more work, so there is nothing to wait for.
        Some((stream, Err(error))) if !error.is_context_lost() => {
            stream.context().leak(value, &error);
        }
        _ => drop(value),
    }
}

/// The work of a consumer that must complete before a release.
#[derive(Debug)]
pub(crate) enum ConsumerWork {
    /// No work, or the consumer has waited for it.
    Finished,
    /// All work in this stream at the time of the release.
    #[cfg(feature = "cuda")]
    On(Stream),
}

impl ConsumerWork {
    /// Drops `value` after the work has run, like [`release_after`].
    pub(crate) fn release<T: Send + 'static>(&self, value: T) {
        match self {
            Self::Finished => drop(value),
            #[cfg(feature = "cuda")]
            Self::On(stream) => release_after(Some(stream), value),
        }
    }
}
