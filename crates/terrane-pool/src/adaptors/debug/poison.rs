//! Fills memory with a pattern when it is allocated and when it is freed. The pattern shows reads
//! of uninitialised or freed memory.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use terrane_core::{
    Allocate, AllocateError, BoxedCause, Location, Memory, RegionRequest, StorageKind,
    delegate_allocate,
};

use crate::streams::fence::StreamId;
use crate::sync::Mutex;

/// Fills memory with a byte in the order of a stream, and writes and reads parts of it. A
/// [`Poison`] and a [`Guard`](crate::adaptors::Guard) access memory through it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not fill memory",
    label = "it does not implement `Fill`",
    note = "`FillHost` fills host memory, and `CudaFill` of `terrane-cuda` fills a device's"
)]
pub trait Fill: Send + Sync + fmt::Debug + 'static {
    /// Fills all of `memory` with `byte`: after the work already submitted to `stream`, and before
    /// later work.
    ///
    /// # Safety
    ///
    /// Until the fill has finished, the memory is alive, and no other code accesses its bytes,
    /// except on `stream`. A fill of host memory finishes before the call returns. Device memory is
    /// freed to its upstream in the order of `stream`.
    ///
    /// # Errors
    ///
    /// The driver's error, or [`CannotFill`] for an unsupported kind of memory.
    unsafe fn fill(
        &self,
        memory: &dyn Memory,
        byte: u8,
        stream: StreamId,
    ) -> Result<(), BoxedCause>;

    /// Returns whether this can write and read memory of this kind. The default supports only host
    /// memory.
    fn reaches(&self, kind: StorageKind) -> bool {
        kind.is_host()
    }

    /// Writes `bytes` at `at`: after the work already submitted to `stream`, and before the call
    /// returns. The default writes host memory on the calling thread.
    ///
    /// # Safety
    ///
    /// The span is valid. No other code accesses it during the call, except earlier work on
    /// `stream`.
    ///
    /// # Errors
    ///
    /// The driver's error, or [`CannotReach`].
    unsafe fn write(&self, at: Location, bytes: &[u8], stream: StreamId) -> Result<(), BoxedCause> {
        let _ = stream;
        let address = at.as_host().ok_or(CannotReach { location: at })?;
        // SAFETY: the caller promises that the span is valid and that no other code accesses it, so
        // it does not overlap `bytes`.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Reads the bytes at `at`, in the same order as [`write`](Self::write).
    ///
    /// # Safety
    ///
    /// As for [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    unsafe fn read(
        &self,
        at: Location,
        into: &mut [u8],
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        let _ = stream;
        let address = at.as_host().ok_or(CannotReach { location: at })?;
        // SAFETY: as for `write`.
        unsafe { ptr::copy_nonoverlapping(address.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

/// Fills host memory, on the calling thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct FillHost;

impl Fill for FillHost {
    unsafe fn fill(&self, memory: &dyn Memory, byte: u8, _: StreamId) -> Result<(), BoxedCause> {
        let cannot = CannotFill { kind: memory.kind() };
        let address = memory.location().as_host().ok_or(cannot)?;
        let length = memory.length().to_usize();
        // SAFETY: a memory's span is valid for writes, and the caller has exclusive access to it.
        unsafe { ptr::write_bytes(address.as_ptr(), byte, length) };
        Ok(())
    }
}

/// The error for a kind of memory that a [`Fill`] does not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this `Fill` cannot fill {kind} memory; use one that supports it")]
pub struct CannotFill {
    /// The kind.
    pub kind: StorageKind,
}

/// The error for a location that a [`Fill`] cannot access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this `Fill` cannot access {location}; use one that supports its memory")]
pub struct CannotReach {
    /// The location.
    pub location: Location,
}

/// The bytes that memory is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoisonBytes {
    /// On allocation. The default, `0xFF`, makes every binary floating-point number a NaN.
    pub allocated: u8,
    /// On free. The default is `0xDE`.
    pub freed: u8,
}

impl Default for PoisonBytes {
    fn default() -> Self {
        Self { allocated: 0xFF, freed: 0xDE }
    }
}

/// An upstream whose memory is filled with a pattern when it is allocated and when it is freed.
///
/// If a fill fails, the allocation still succeeds. [`report`](Self::report) contains the number of
/// failures and the last cause.
#[derive(Debug)]
pub struct Poison<A> {
    upstream: A,
    filler: Arc<PoisonFiller>,
}

#[derive(Debug)]
struct PoisonFiller {
    fill: Arc<dyn Fill>,
    bytes: PoisonBytes,
    stream: StreamId,
    report: Mutex<PoisonReport>,
}

/// The counts of a [`Poison`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PoisonReport {
    /// Fills that were carried out, or submitted to the stream.
    pub filled: u64,
    /// Fills that failed, so the memory kept its content.
    pub failed: u64,
    /// The cause of the last failure.
    pub last_failure: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl<A: Allocate> Poison<A> {
    /// Fills memory of `upstream` through `fill`, in the order of `stream`. Host memory ignores the
    /// stream.
    #[must_use]
    pub fn new(upstream: A, fill: impl Fill, bytes: PoisonBytes, stream: StreamId) -> Self {
        Self::through(upstream, Arc::new(fill), bytes, stream)
    }

    /// Like [`new`](Self::new), with a `fill` that others share.
    pub(super) fn through(
        upstream: A,
        fill: Arc<dyn Fill>,
        bytes: PoisonBytes,
        stream: StreamId,
    ) -> Self {
        let report = Mutex::new(PoisonReport::default());
        let filler = PoisonFiller { fill, bytes, stream, report };
        Self { upstream, filler: Arc::new(filler) }
    }

    /// Fills host memory of `upstream` with the default bytes. Every fill of other memory fails,
    /// and is counted in the [`report`](Self::report).
    #[must_use]
    pub fn on_host(upstream: A) -> Self {
        Self::new(upstream, FillHost, PoisonBytes::default(), StreamId::new(0))
    }

    /// Returns the counts of fills and failures.
    #[must_use]
    pub fn report(&self) -> PoisonReport {
        self.filler.report.lock().clone()
    }
}

impl PoisonFiller {
    /// # Safety
    ///
    /// As for [`Fill::fill`].
    unsafe fn fill(&self, memory: &dyn Memory, byte: u8) {
        if memory.length().is_zero() {
            return;
        }
        // SAFETY: by the caller's promise.
        match unsafe { self.fill.fill(memory, byte, self.stream) } {
            Ok(()) => self.report.lock().filled += 1,
            Err(error) => {
                tracing::warn!(%error, kind = %memory.kind(), "memory was not poisoned");
                let mut report = self.report.lock();
                report.failed += 1;
                let before = report.last_failure.replace(error.into());
                drop(report);
                // Dropping an error may run foreign code.
                drop(before);
            }
        }
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Poison<A> {
    type Memory = Poisoned<A::Memory>;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let memory = self.upstream.allocate(request)?;
        // SAFETY: only this function can access the memory. After it, the caller uses the memory in
        // the order of the stream.
        unsafe { self.filler.fill(&memory, self.filler.bytes.allocated) };
        Ok(Poisoned { memory, filler: Arc::clone(&self.filler) })
    }
}

/// Memory from [`Poison`].
pub struct Poisoned<M: Memory> {
    memory: M,
    filler: Arc<PoisonFiller>,
}

impl<M: Memory> Drop for Poisoned<M> {
    fn drop(&mut self) {
        // SAFETY: the owner is dropping the memory, so no code uses it, except earlier work on the
        // stream. The memory is freed after this call.
        unsafe { self.filler.fill(&self.memory, self.filler.bytes.freed) };
    }
}

// SAFETY: every method returns the memory's value. The memory is neither moved nor dropped before
// `self`.
unsafe impl<M: Memory> Memory for Poisoned<M> {
    terrane_core::delegate_memory!(self, self.memory);
}

impl<M: Memory> fmt::Debug for Poisoned<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::ByteCount;
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    #[test]
    fn failed_fills_are_reported_and_not_refused() {
        let source = Poison::on_host(Simulated::new(SimulatedOptions::default()));
        drop(source.allocate(&RegionRequest::new(ByteCount::new(8))).unwrap());
        drop(source.allocate(&RegionRequest::new(ByteCount::ZERO)).unwrap());
        let report = source.report();
        assert_eq!((report.filled, report.failed), (0, 2));
        let cause = report.last_failure.unwrap();
        assert!(cause.downcast_ref::<CannotFill>().is_some(), "{cause}");
    }
}
