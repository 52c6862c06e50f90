//! The stream that a consumer requests.
//!
//! In the array API standard, the consumer names a stream in the argument `stream` of
//! [`__dlpack__`]. The producer ensures that work which the consumer submits to that stream later
//! finds the data written.
//!
//! [`__dlpack__`]: https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html

#[cfg(feature = "cuda")]
use terrane_core::DeviceId;
#[cfg(feature = "cuda")]
use terrane_cuda::CudaError;

use super::TensorDevice;

/// The value that a consumer passes as `stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConsumerStream {
    /// `None`: on a device, the legacy default stream. The host has no stream.
    Unstated,
    /// −1: the consumer orders the two sides itself.
    Unordered,
    /// 1: the legacy default stream.
    LegacyDefault,
    /// 2: the default stream of the calling thread.
    PerThreadDefault,
    /// More than 2: a stream by its handle.
    Handle(u64),
}

impl ConsumerStream {
    /// Interprets the number for a tensor on `device`.
    ///
    /// # Errors
    ///
    /// [`StreamError::OnHost`] for any number on the host, [`StreamError::Ambiguous`] for 0, which
    /// could be any of three streams, and [`StreamError::Negative`] below −1.
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

    /// The argument of the standard: `None`, or a number.
    #[must_use]
    pub fn to_python(self) -> Option<i64> {
        match self {
            Self::Unstated => None,
            Self::Unordered => Some(-1),
            Self::LegacyDefault => Some(1),
            Self::PerThreadDefault => Some(2),
            // Handles are addresses of the host, which have at most 63 bits.
            Self::Handle(handle) => i64::try_from(handle).ok(),
        }
    }
}

/// The reason why a consumer's stream was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// A stream was passed for the host.
    #[error("stream {stream} was passed for a tensor on the host, which has no streams; pass None")]
    OnHost {
        /// The number that was passed.
        stream: i64,
    },
    /// Zero could mean no stream, or either default stream.
    #[error("stream 0 is ambiguous; pass None, 1 (legacy default) or 2 (per-thread default)")]
    Ambiguous,
    /// No stream has this number.
    #[error("stream {stream} does not exist; pass −1 for no order, or None")]
    Negative {
        /// The number that was passed.
        stream: i64,
    },
    /// The driver refused.
    #[cfg(feature = "cuda")]
    #[error("ordering the streams of CUDA device {device} failed; see the cause")]
    Driver {
        /// The device.
        device: DeviceId,
        /// The driver's error.
        #[source]
        source: CudaError,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::DeviceId;

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
            let consumer = from(stream).unwrap();
            assert_eq!(consumer, expected);
            assert_eq!(consumer.to_python(), stream);
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
}
