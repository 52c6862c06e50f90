//! Reads the offsets of an array during its import: at once, in a stream's order, or later.

use std::ptr::{self, NonNull};

use terrane_core::convert::to_u64;
use terrane_core::{ByteCount, DeviceAddress, HostAddress, Location, Span, StorageKind};
use terrane_cuda::Stream;

use super::error::ImportError;

/// Reads bytes of a foreign array. The importer promised that they exist.
pub(super) trait OffsetReader {
    /// Copies bytes from `at`; false if that is not possible yet.
    fn read(&self, at: Location, into: &mut [u8]) -> Result<bool, ImportError>;

    /// Copies numbers that the producer stores on the host, or in the array's memory; false if that
    /// is not possible yet.
    fn sizes(&self, at: NonNull<u8>, into: &mut [u8]) -> Result<bool, ImportError>;

    /// Checks that the span is in the stated kind of memory, if possible.
    fn admit(&self, span: Span) -> Result<(), ImportError>;
}

/// Host memory that is ready.
pub(super) struct InHost;

impl OffsetReader for InHost {
    fn read(&self, at: Location, into: &mut [u8]) -> Result<bool, ImportError> {
        let Some(from) = at.as_host() else { return Err(ImportError::NotReady) };
        // SAFETY: the bytes exist and no code writes them, as the importer of the array promised.
        // `into` is an exclusive reference.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(true)
    }

    fn sizes(&self, at: NonNull<u8>, into: &mut [u8]) -> Result<bool, ImportError> {
        self.read(Location::Host(HostAddress::new(at)), into)
    }

    fn admit(&self, _: Span) -> Result<(), ImportError> {
        Ok(())
    }
}

/// Memory whose producer may not have finished.
pub(super) struct NotYet;

impl OffsetReader for NotYet {
    fn read(&self, _: Location, _: &mut [u8]) -> Result<bool, ImportError> {
        Ok(false)
    }

    fn sizes(&self, _: NonNull<u8>, _: &mut [u8]) -> Result<bool, ImportError> {
        Ok(false)
    }

    fn admit(&self, _: Span) -> Result<(), ImportError> {
        Ok(())
    }
}

/// Memory that is ready in the order of a stream.
pub(super) struct InOrder<'a>(pub &'a Stream);

impl OffsetReader for InOrder<'_> {
    fn read(&self, at: Location, into: &mut [u8]) -> Result<bool, ImportError> {
        if at.as_host().is_some() {
            // The stream may wait for work that writes host memory.
            self.0.synchronize()?;
            return InHost.read(at, into);
        }
        let length = ByteCount::from_usize(into.len());
        let to = HostAddress::new(NonNull::from(into).cast::<u8>());
        // SAFETY: the bytes exist, as the importer of the array promised, and `admit` has checked
        // them with the driver. The destination outlives the copy, because the stream is
        // synchronised.
        unsafe { self.0.copy(at, Location::Host(to), length) }?;
        self.0.synchronize()?;
        Ok(true)
    }

    fn sizes(&self, at: NonNull<u8>, into: &mut [u8]) -> Result<bool, ImportError> {
        let address = DeviceAddress::new(to_u64(at.addr().get()));
        let length = ByteCount::from_usize(into.len());
        match self.0.context().device_span(address, length) {
            Ok(span) => self.read(span.location, into),
            Err(error) if error.is_context_lost() => Err(error.into()),
            // Host memory, written when the array was created.
            Err(_) => InHost.sizes(at, into),
        }
    }

    fn admit(&self, span: Span) -> Result<(), ImportError> {
        if let (StorageKind::Device(_), Location::Device { address, .. }) =
            (span.kind, span.location)
            && !span.length.is_zero()
        {
            self.0.context().device_span(address, span.length)?;
        }
        Ok(())
    }
}
