//! The order between the streams of the two sides of an exchange.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};

use terrane_core::ByteCount;
use terrane_core::convert::to_u64;
use terrane_cuda::{Context, Event, Stream, Timing};

use super::{ConsumerStream, StreamError};

impl ConsumerStream {
    /// The value of `stream` in a request for a tensor that `stream` will work on.
    #[must_use]
    pub fn of(stream: &Stream) -> Self {
        match to_u64(stream.handle().addr()) {
            0 | 1 => Self::LegacyDefault,
            handle => Self::Handle(handle),
        }
    }

    /// The named stream of `context`'s device, for
    /// [`TensorExport::released_after`](super::TensorExport::released_after). `None` if no stream
    /// is named. `None` also for the per-thread default stream, because the thread that drops the
    /// tensor may be another one. `owner` is kept while the returned stream lives.
    ///
    /// # Errors
    ///
    /// [`StreamError::Driver`] if it is a stream of another device, or the driver refuses.
    ///
    /// # Safety
    ///
    /// A [`Handle`](Self::Handle) is a live stream while `owner` lives.
    pub unsafe fn to_stream(
        self,
        context: &Context,
        owner: impl Any + Send + Sync,
    ) -> Result<Option<Stream>, StreamError> {
        let Some(handle) = self.handle().filter(|_| self != Self::PerThreadDefault) else {
            return Ok(None);
        };
        // SAFETY: the caller promised a valid handle, and default streams live as long as the
        // context.
        let stream = unsafe { Stream::borrow(context, handle, owner) };
        let failed = |source| StreamError::Driver { device: context.device().id, source };
        stream.map(Some).map_err(failed)
    }

    /// The driver's handle of the stream; `None` if no order is needed.
    fn handle(self) -> Option<*mut c_void> {
        match self {
            Self::Unordered => None,
            Self::Unstated | Self::LegacyDefault => Some(null_mut()),
            Self::PerThreadDefault => Some(without_provenance_mut(2)),
            Self::Handle(handle) => {
                Some(std::ptr::with_exposed_provenance_mut(ByteCount::new(handle).to_usize()))
            }
        }
    }
}

/// The work that must precede the use of an exported tensor.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ProducerStream<'a> {
    /// None: the writes have completed. This is the case for held blocks.
    Complete,
    /// All work submitted to this stream so far.
    Stream(&'a Stream),
    /// The work that this event marks.
    Event(&'a Event),
}

/// The result of a handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Handshake {
    /// No wait was needed: the data is complete, both sides use one stream, or the consumer
    /// requested no order.
    Nothing,
    /// The consumer's stream waits for an event.
    Waits,
}

/// Makes `consumer` wait for `producer` before it accesses a tensor of `context`'s device. The call
/// does not block: one stream records an event, and the other waits for the event.
///
/// Streams do not order accesses to host memory, so writes there must have ended.
///
/// # Errors
///
/// [`StreamError::Driver`] if the consumer's stream is of another device, or the driver refuses.
///
/// # Safety
///
/// A [`ConsumerStream::Handle`] is a live stream until this returns.
pub unsafe fn handshake(
    context: &Context,
    producer: ProducerStream<'_>,
    consumer: ConsumerStream,
) -> Result<Handshake, StreamError> {
    let Some(to) = waits(context, producer, consumer) else { return Ok(Handshake::Nothing) };
    let failed = |source| StreamError::Driver { device: context.device().id, source };
    let delay = |event: &Event| {
        if consumer == ConsumerStream::PerThreadDefault {
            // The consumer calls this on the thread whose default stream it names.
            return event.delay_thread_stream(context);
        }
        // SAFETY: the caller promised a valid handle; the legacy default stream lives as long as
        // the context.
        unsafe { Stream::borrow(context, to, ()) }?.wait_for(event)
    };
    match producer {
        ProducerStream::Complete => Ok(()),
        ProducerStream::Stream(from) => Event::new(from.context(), Timing::Off)
            .and_then(|event| event.record(from).and_then(|()| delay(&event))),
        ProducerStream::Event(event) => delay(event),
    }
    .map_err(failed)?;
    Ok(Handshake::Waits)
}

/// The stream of `context` that must wait, if any.
fn waits(
    context: &Context,
    producer: ProducerStream<'_>,
    consumer: ConsumerStream,
) -> Option<*mut c_void> {
    let to = consumer.handle()?;
    match producer {
        ProducerStream::Complete => None,
        // Each device has its own default streams under the same handles.
        ProducerStream::Stream(from)
            if from.context().device().id == context.device().id && same(from.handle(), to) =>
        {
            None
        }
        _ => Some(to),
    }
}

/// Whether both handles are the same stream of a device. The legacy default stream has two handles.
fn same(a: *mut c_void, b: *mut c_void) -> bool {
    let plain = |handle: *mut c_void| if handle.addr() == 1 { 0 } else { handle.addr() };
    plain(a) == plain(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_stream_does_not_wait_for_itself() {
        let at = |address| without_provenance_mut(address);
        assert!(same(at(4096), at(4096)) && same(at(0), at(1)));
        assert!(!same(at(4096), at(8192)) && !same(at(0), at(2)));
    }
}
