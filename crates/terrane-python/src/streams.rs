//! Streams of this package that wait for the work of other libraries.

use std::sync::Mutex;

use terrane_core::sync::lock;
use terrane_cuda::{Context, CudaError, Event, Stream};

/// The maximum number of streams that a pool keeps. Further streams are destroyed after their use, which does not
/// stop their work.
const MOST_KEPT: usize = 16;

/// Streams of one device. Each use has its own stream, so that no caller waits for another caller's work.
pub(crate) struct StreamPool {
    context: Context,
    /// Used streams, each with an event after its work.
    used: Mutex<Vec<(Event, Stream)>>,
}

impl StreamPool {
    pub(crate) fn new(context: &Context) -> Self {
        Self { context: context.clone(), used: Mutex::new(Vec::new()) }
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// An idle stream: a used one whose event is complete, or a new one.
    pub(crate) fn take(&self) -> Result<Stream, CudaError> {
        // The driver is not called under the lock.
        let mut used = std::mem::take(&mut *lock(&self.used));
        let is_idle = |(event, _): &(Event, Stream)| event.is_complete().unwrap_or(false);
        let idle = used.iter().position(is_idle).map(|at| used.swap_remove(at));
        lock(&self.used).append(&mut used);
        match idle {
            Some((_, stream)) => Ok(stream),
            None => Stream::new(&self.context),
        }
    }

    /// Returns a stream. It is reused when the event is complete.
    pub(crate) fn put_back(&self, stream: Stream, event: &Event) {
        let mut used = lock(&self.used);
        if used.len() < MOST_KEPT {
            used.push((event.clone(), stream));
        }
    }
}
