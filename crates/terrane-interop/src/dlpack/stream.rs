//! The order of streams between the two sides of an exchange.
//!
//! The array API standard has the consumer name a stream, and the producer see to it that what runs
//! there from then on finds the data written: [`__dlpack__`], argument `stream`.
//!
//! [`__dlpack__`]: https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};

use terrane_core::{ByteCount, DeviceId};
use terrane_cuda::{Context, CudaError, Event, Stream, Timing};

use super::TensorDevice;

/// What a consumer passes as `stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConsumerStream {
    /// `None`: on a device the legacy default stream; on the host there is none.
    Unstated,
    /// −1: the consumer orders the two sides by itself.
    Unordered,
    /// 1: the legacy default stream.
    LegacyDefault,
    /// 2: the default stream of the thread that asks.
    PerThreadDefault,
    /// More than 2: a stream by its handle.
    Handle(u64),
}

impl ConsumerStream {
    /// What the number means for a tensor on `device`.
    ///
    /// # Errors
    ///
    /// [`StreamError::OnHost`] for any number on the host, [`StreamError::Ambiguous`] for 0, which
    /// could be any of three, and [`StreamError::Negative`] below −1.
    pub fn from_python(device: TensorDevice, stream: Option<i64>) -> Result<Self, StreamError> {
        let Some(stream) = stream else { return Ok(Self::Unstated) };
        if !matches!(device, TensorDevice::Cuda(_)) {
            return Err(StreamError::OnHost { stream });
        }
        match stream {
            -1 => Ok(Self::Unordered),
            0 => Err(StreamError::Ambiguous),
            1 => Ok(Self::LegacyDefault),
            2 => Ok(Self::PerThreadDefault),
            _ => u64::try_from(stream)
                .map(Self::Handle)
                .map_err(|_| StreamError::Negative { stream }),
        }
    }

    /// What to pass as `stream` when asking a producer for a tensor that `stream` will work on.
    #[must_use]
    pub fn of(stream: &Stream) -> Self {
        match ByteCount::from_usize(stream.handle().addr()).get() {
            0 | 1 => Self::LegacyDefault,
            2 => Self::PerThreadDefault,
            handle => Self::Handle(handle),
        }
    }

    /// As the standard writes it: `None`, or a number.
    #[must_use]
    pub fn to_python(self) -> Option<i64> {
        match self {
            Self::Unstated => None,
            Self::Unordered => Some(-1),
            Self::LegacyDefault => Some(1),
            Self::PerThreadDefault => Some(2),
            // Handles are addresses of the host, which have 63 bits at most.
            Self::Handle(handle) => i64::try_from(handle).ok(),
        }
    }

    /// The stream of `context`'s device that it names, to be waited for when the consumer has
    /// dropped the tensor ([`TensorExport::released_after`](super::TensorExport::released_after));
    /// `None` if it names none, or the default stream of a thread, which is another one on each.
    /// `owner` is kept for as long as the answer lives.
    ///
    /// # Errors
    ///
    /// [`StreamError::Driver`] if it is a stream of another device.
    ///
    /// # Safety
    ///
    /// A [`Handle`](Self::Handle) is a live stream for as long as `owner` lives.
    pub unsafe fn to_stream(
        self,
        context: &Context,
        owner: impl Any + Send + Sync,
    ) -> Result<Option<Stream>, StreamError> {
        let Some(handle) = self.handle().filter(|_| self != Self::PerThreadDefault) else {
            return Ok(None);
        };
        // SAFETY: the caller's promise of a handle; default streams live as long as the context.
        let stream = unsafe { Stream::borrow(context, handle, owner) };
        let failed = |source| StreamError::Driver { device: context.device().id, source };
        stream.map(Some).map_err(failed)
    }

    /// The handle that the driver knows the stream by; `None` if nothing is to be ordered.
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

/// What the data of a tensor that is handed out comes after.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum ProducerStream<'a> {
    /// It is there: what wrote it has been waited for. So it is with blocks that are held.
    Complete,
    /// All that this stream has been given so far.
    Stream(&'a Stream),
    /// What this event marks.
    Event(&'a Event),
}

/// What a handshake came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Handshake {
    /// Nothing was to be waited for: the data is there, or one stream has both sides, or the
    /// consumer wants no order.
    Nothing,
    /// The consumer's stream waits for an event.
    Waits,
}

/// Lets `consumer` wait for `producer` before it touches a tensor of `context`'s device. Nothing
/// blocks: an event is recorded on the one stream, and waited for by the other.
///
/// On the host nothing is to be ordered by streams: what writes there has to have ended.
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
    // SAFETY: the caller's promise of a handle; default streams live as long as the context.
    let to = unsafe { Stream::borrow(context, to, ()) }.map_err(failed)?;
    match producer {
        ProducerStream::Complete => {}
        ProducerStream::Stream(from) => {
            let event = Event::new(from.context(), Timing::Off).map_err(failed)?;
            event.record(from).map_err(failed)?;
            to.wait_for(&event).map_err(failed)?;
        }
        ProducerStream::Event(event) => to.wait_for(event).map_err(failed)?,
    }
    Ok(Handshake::Waits)
}

/// The stream of `context` that has to wait, if one has to.
fn waits(
    context: &Context,
    producer: ProducerStream<'_>,
    consumer: ConsumerStream,
) -> Option<*mut c_void> {
    let to = consumer.handle()?;
    match producer {
        ProducerStream::Complete => None,
        // Each device has default streams of its own, under the same handles.
        ProducerStream::Stream(from)
            if from.context().device().id == context.device().id && same(from.handle(), to) =>
        {
            None
        }
        _ => Some(to),
    }
}

/// Whether both handles are one stream of a device. The legacy default stream has two.
fn same(a: *mut c_void, b: *mut c_void) -> bool {
    let plain = |handle: *mut c_void| if handle.addr() == 1 { 0 } else { handle.addr() };
    // The default stream of a thread is another one on each.
    plain(a) == plain(b) && a.addr() != 2
}

/// Why a consumer's stream was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// A stream for the host.
    #[error("stream {stream} for a tensor on the host, which has no streams; pass None")]
    OnHost {
        /// What was passed.
        stream: i64,
    },
    /// Zero could be no stream, or either default stream.
    #[error("stream 0 is ambiguous; pass None, 1 (legacy default) or 2 (per-thread default)")]
    Ambiguous,
    /// No stream has such a number.
    #[error("stream {stream} is none; −1 asks for no order")]
    Negative {
        /// What was passed.
        stream: i64,
    },
    /// The driver refused.
    #[error("ordering the streams of CUDA device {device} failed")]
    Driver {
        /// The device.
        device: DeviceId,
        /// What it said.
        #[source]
        source: CudaError,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUDA: TensorDevice = TensorDevice::Cuda(DeviceId::new(0));

    #[test]
    fn the_standard_s_numbers() {
        let from = |stream| ConsumerStream::from_python(CUDA, stream);
        for (stream, expected) in [
            (None, ConsumerStream::Unstated),
            (Some(-1), ConsumerStream::Unordered),
            (Some(1), ConsumerStream::LegacyDefault),
            (Some(2), ConsumerStream::PerThreadDefault),
            (Some(0x7f00_1234_5678), ConsumerStream::Handle(0x7f00_1234_5678)),
        ] {
            let found = from(stream).unwrap();
            assert_eq!(found, expected);
            assert_eq!(found.to_python(), stream);
        }
        assert!(matches!(from(Some(0)), Err(StreamError::Ambiguous)));
        for stream in [-2, i64::MIN] {
            assert!(matches!(from(Some(stream)), Err(StreamError::Negative { .. })));
        }
    }

    #[test]
    fn the_host_has_no_streams() {
        for device in [TensorDevice::Host, TensorDevice::PinnedHost] {
            assert_eq!(
                ConsumerStream::from_python(device, None).unwrap(),
                ConsumerStream::Unstated
            );
            for stream in [-1, 0, 1, 2, 77] {
                let refused = ConsumerStream::from_python(device, Some(stream));
                assert!(matches!(refused, Err(StreamError::OnHost { .. })));
            }
        }
    }

    #[test]
    fn one_stream_does_not_wait_for_itself() {
        let at = |address| without_provenance_mut(address);
        assert!(same(at(4096), at(4096)) && same(at(0), at(1)));
        assert!(!same(at(4096), at(8192)) && !same(at(2), at(2)) && !same(at(0), at(2)));
    }
}
