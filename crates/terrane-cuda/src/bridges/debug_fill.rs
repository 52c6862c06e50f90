//! Poison and canaries in device and pinned memory.

use std::ptr;

use terrane_core::{BoxedCause, ByteCount, HostAddress, Location, Memory, StorageKind};
use terrane_pool::StreamId;
use terrane_pool::adaptors::{CannotFill, CannotReach, Fill};

use crate::bridges::pool_streams::CudaStreams;

/// Lets [`Poison`](terrane_pool::adaptors::Poison) and [`Guard`](terrane_pool::adaptors::Guard)
/// access device and host memory, in the order of a stream of [`CudaStreams`].
///
/// The device fills device memory on the stream, and canaries are copied on the stream. The calling
/// thread writes and reads host memory, pinned or not, after the stream has finished its earlier
/// work.
///
/// ```no_run
/// use terrane_core::DeviceId;
/// use terrane_cuda::{Context, CudaFill, CudaStreams, DeviceAllocator};
/// use terrane_pool::StreamSource;
/// use terrane_pool::adaptors::DebugOptions;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Context::primary(DeviceId::new(0))?;
/// let streams = CudaStreams::new(&context);
/// let stream = StreamSource::create(&streams)?;
/// // As TERRANE_POISON and TERRANE_GUARD say.
/// let (source, log) = DebugOptions::from_env()?.around(
///     DeviceAllocator::new(&context),
///     CudaFill::new(&streams),
///     stream,
/// );
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct CudaFill {
    streams: CudaStreams,
    waits: bool,
}

impl CudaFill {
    /// Fills that have completed when the call returns. The memory is then usable on any stream,
    /// and may return to any upstream.
    #[must_use]
    pub fn new(streams: &CudaStreams) -> Self {
        Self { streams: streams.clone(), waits: true }
    }

    /// Fills of device memory that have been submitted to the stream when the call returns. Use
    /// them for memory of that stream alone, whose upstream frees it in the order of the stream.
    #[must_use]
    pub fn without_waiting(streams: &CudaStreams) -> Self {
        Self { streams: streams.clone(), waits: false }
    }

    fn is_own(&self, location: Location) -> bool {
        let own = self.streams.context().device().id;
        matches!(location, Location::Device { device, .. } if device == own)
    }

    /// Copies between `at` and the caller's bytes, after the earlier work of the stream, and waits.
    ///
    /// # Safety
    ///
    /// Both spans are valid, and only earlier work of the stream uses them. The caller's bytes are
    /// pageable.
    unsafe fn copy(
        &self,
        at: Location,
        [from, to]: [Location; 2],
        bytes: usize,
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        match (from, to) {
            (Location::Host(from), Location::Host(to)) => {
                self.streams.get(stream)?.synchronize()?;
                // SAFETY: the spans are valid, and nothing else uses them, as the caller guarantees.
                unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), bytes) };
            }
            _ if self.is_own(at) => {
                let stream = self.streams.get(stream)?;
                // SAFETY: the caller guarantees valid spans. The caller's bytes are pageable: the
                // driver has read or written them when the call returns.
                unsafe { stream.copy(from, to, ByteCount::from_usize(bytes)) }?;
                stream.synchronize()?;
            }
            _ => return Err(Box::new(CannotReach { location: at })),
        }
        Ok(())
    }
}

impl Fill for CudaFill {
    unsafe fn fill(
        &self,
        memory: &dyn Memory,
        byte: u8,
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        let (kind, location, length) = (memory.kind(), memory.location(), memory.length());
        match location {
            Location::Host(address) => {
                self.streams.get(stream)?.synchronize()?;
                // SAFETY: the span is valid for writes. The caller uses it exclusively, except for
                // work of the stream, which has completed.
                unsafe { ptr::write_bytes(address.as_ptr(), byte, length.to_usize()) };
            }
            _ if self.is_own(location) => {
                let stream = self.streams.get(stream)?;
                // SAFETY: the caller guarantees that the memory is alive until the fill has run,
                // and that nothing else uses it.
                unsafe { stream.fill(location, byte, length) }?;
                if self.waits {
                    stream.synchronize()?;
                }
            }
            _ => return Err(Box::new(CannotFill { kind })),
        }
        Ok(())
    }

    fn reaches(&self, kind: StorageKind) -> bool {
        kind.is_host() || kind == self.streams.context().kind()
    }

    unsafe fn write(&self, at: Location, bytes: &[u8], stream: StreamId) -> Result<(), BoxedCause> {
        let from = Location::Host(HostAddress::new(ptr::NonNull::from(bytes).cast::<u8>()));
        // SAFETY: the caller's guarantee, and the bytes are borrowed until the call returns.
        unsafe { self.copy(at, [from, at], bytes.len(), stream) }
    }

    unsafe fn read(
        &self,
        at: Location,
        into: &mut [u8],
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        let length = into.len();
        let to = Location::Host(HostAddress::new(ptr::NonNull::from(into).cast::<u8>()));
        // SAFETY: the caller's guarantee, and the bytes are borrowed until the call returns.
        unsafe { self.copy(at, [at, to], length, stream) }
    }
}
