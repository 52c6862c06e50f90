//! Fills memory with a pattern when it is handed out and when it goes, so that whoever reads what
//! was never written, or is no longer theirs, sees it.

use std::fmt;
use std::ptr;
use std::sync::Arc;

use terrane_core::{
    Allocate, AllocateError, BoxedCause, Limits, Location, Memory, RegionRequest, StorageKind,
};

use crate::StreamId;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Writes a byte all over some memory, in the order of a stream, and reaches single bytes of it: what
/// a [`Poison`] and a [`Guard`](super::Guard) do to memory.
pub trait Fill: Send + Sync + fmt::Debug + 'static {
    /// Fills all of `memory` with `byte`: after what `stream` has been given to do so far, and
    /// before what it is given later.
    ///
    /// # Safety
    ///
    /// Until the fill has finished, the memory is alive and nobody else accesses its bytes,
    /// except on `stream`. What lies in host memory finishes before the call returns; memory of a
    /// device goes back to its upstream in the order of `stream`.
    ///
    /// # Errors
    ///
    /// What the driver says, or [`CannotFill`] for a kind of memory that it does not know.
    unsafe fn fill(
        &self,
        memory: &dyn Memory,
        byte: u8,
        stream: StreamId,
    ) -> Result<(), BoxedCause>;

    /// Whether memory of this kind can be written and read here. By default, if it is the host's.
    fn reaches(&self, kind: StorageKind) -> bool {
        kind.is_host()
    }

    /// Writes `bytes` at `at`: after what `stream` has been given to do so far, and before the call
    /// returns. By default, to host memory, and on the calling thread.
    ///
    /// # Safety
    ///
    /// The span is valid, and nobody else accesses it meanwhile, except on `stream` before.
    ///
    /// # Errors
    ///
    /// What the driver says, or [`CannotReach`].
    unsafe fn write(&self, at: Location, bytes: &[u8], stream: StreamId) -> Result<(), BoxedCause> {
        let _ = stream;
        let Location::Host(address) = at else {
            return Err(Box::new(CannotReach { location: at }));
        };
        // SAFETY: the span is valid by the caller's promise, and no reference to it exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Reads the bytes at `at`, as [`write`](Self::write) writes them.
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
        let Location::Host(address) = at else {
            return Err(Box::new(CannotReach { location: at }));
        };
        // SAFETY: as for `write`.
        unsafe { ptr::copy_nonoverlapping(address.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }
}

impl<F: Fill + ?Sized> Fill for Arc<F> {
    unsafe fn fill(
        &self,
        memory: &dyn Memory,
        byte: u8,
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        // SAFETY: by the caller's promise.
        unsafe { (**self).fill(memory, byte, stream) }
    }

    fn reaches(&self, kind: StorageKind) -> bool {
        (**self).reaches(kind)
    }

    unsafe fn write(&self, at: Location, bytes: &[u8], stream: StreamId) -> Result<(), BoxedCause> {
        // SAFETY: by the caller's promise.
        unsafe { (**self).write(at, bytes, stream) }
    }

    unsafe fn read(
        &self,
        at: Location,
        into: &mut [u8],
        stream: StreamId,
    ) -> Result<(), BoxedCause> {
        // SAFETY: by the caller's promise.
        unsafe { (**self).read(at, into, stream) }
    }
}

/// Fills host memory, on the calling thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct FillHost;

impl Fill for FillHost {
    unsafe fn fill(&self, memory: &dyn Memory, byte: u8, _: StreamId) -> Result<(), BoxedCause> {
        let kind = memory.kind();
        let Location::Host(address) = memory.location() else {
            return Err(Box::new(CannotFill { kind }));
        };
        let length = memory.length().to_usize();
        // SAFETY: a memory's span is valid for writes, and the caller has it to itself.
        unsafe { ptr::write_bytes(address.as_ptr(), byte, length) };
        Ok(())
    }
}

/// Memory of a kind that a [`Fill`] does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{kind} memory cannot be filled from here; give a `Fill` that knows it")]
pub struct CannotFill {
    /// The kind.
    pub kind: StorageKind,
}

/// A place that a [`Fill`] cannot reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{location} cannot be reached from here; give a `Fill` that knows it")]
pub struct CannotReach {
    /// The place.
    pub location: Location,
}

/// With what memory is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoisonBytes {
    /// When it is handed out. The default, `0xFF`, makes every binary floating-point number a NaN.
    pub allocated: u8,
    /// When it goes back. The default is `0xDE`.
    pub freed: u8,
}

impl Default for PoisonBytes {
    fn default() -> Self {
        Self { allocated: 0xFF, freed: 0xDE }
    }
}

/// An upstream whose memory is filled with a pattern when it is handed out and when it goes back.
///
/// A fill that fails refuses no memory: it is counted, and its cause kept, in
/// [`report`](Self::report).
#[derive(Debug)]
pub struct Poison<A> {
    upstream: A,
    painter: Arc<Painter>,
}

#[derive(Debug)]
struct Painter {
    fill: Box<dyn Fill>,
    bytes: PoisonBytes,
    stream: StreamId,
    filled: AtomicU64,
    failed: AtomicU64,
    last_failure: Mutex<Option<Arc<dyn std::error::Error + Send + Sync>>>,
}

/// What a [`Poison`] has done.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PoisonReport {
    /// Fills that were carried out, or given to the stream.
    pub filled: u64,
    /// Fills that failed, so that memory kept what was in it.
    pub failed: u64,
    /// Why the last one failed.
    pub last_failure: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl<A: Allocate> Poison<A> {
    /// Fills what `upstream` hands out by means of `fill`, in the order of `stream`, which host
    /// memory ignores.
    #[must_use]
    pub fn new(upstream: A, fill: impl Fill, bytes: PoisonBytes, stream: StreamId) -> Self {
        let painter = Painter {
            fill: Box::new(fill),
            bytes,
            stream,
            filled: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            last_failure: Mutex::new(None),
        };
        Self { upstream, painter: Arc::new(painter) }
    }

    /// Fills what `upstream`, which is of host memory, hands out.
    #[must_use]
    pub fn on_host(upstream: A) -> Self {
        Self::new(upstream, FillHost, PoisonBytes::default(), StreamId::new(0))
    }

    /// What has been filled, and what could not be.
    #[must_use]
    pub fn report(&self) -> PoisonReport {
        PoisonReport {
            filled: self.painter.filled.load(Ordering::Relaxed),
            failed: self.painter.failed.load(Ordering::Relaxed),
            last_failure: self.painter.last_failure.lock().clone(),
        }
    }
}

impl Painter {
    /// # Safety
    ///
    /// As for [`Fill::fill`].
    unsafe fn paint(&self, memory: &dyn Memory, byte: u8) {
        if memory.length().is_zero() {
            return;
        }
        // SAFETY: by the caller's promise.
        match unsafe { self.fill.fill(memory, byte, self.stream) } {
            Ok(()) => {
                self.filled.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => {
                tracing::warn!(%error, kind = %memory.kind(), "memory was not poisoned");
                self.failed.fetch_add(1, Ordering::Relaxed);
                let before = self.last_failure.lock().replace(error.into());
                // An error is foreign code when it drops.
                drop(before);
            }
        }
    }
}

// SAFETY: the memory is the upstream's, which gives it to no other caller.
unsafe impl<A: Allocate> Allocate for Poison<A> {
    type Memory = Poisoned<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    fn limits(&self) -> Limits {
        self.upstream.limits()
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let memory = self.upstream.allocate(request)?;
        // SAFETY: nobody has the memory but this function, and then whoever it is handed to,
        // in the order of the stream.
        unsafe { self.painter.paint(&memory, self.painter.bytes.allocated) };
        Ok(Poisoned { memory, painter: Arc::clone(&self.painter) })
    }
}

/// What [`Poison`] hands out.
pub struct Poisoned<M: Memory> {
    memory: M,
    painter: Arc<Painter>,
}

impl<M: Memory> Drop for Poisoned<M> {
    fn drop(&mut self) {
        // SAFETY: its last user has given the memory up, and it goes back after this.
        unsafe { self.painter.paint(&self.memory, self.painter.bytes.freed) };
    }
}

// SAFETY: every answer is that of the memory, which is neither moved nor dropped before `self`.
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
    use super::super::{Simulated, SimulatedOptions};
    use super::*;
    use terrane_core::ByteCount;

    #[test]
    fn what_cannot_be_filled_is_reported_and_not_refused() {
        let source = Poison::on_host(Simulated::new(SimulatedOptions::default()));
        drop(source.allocate(&RegionRequest::new(ByteCount::new(8))).unwrap());
        drop(source.allocate(&RegionRequest::new(ByteCount::ZERO)).unwrap());
        let report = source.report();
        assert_eq!((report.filled, report.failed), (0, 2));
        let cause = report.last_failure.unwrap();
        assert!(cause.downcast_ref::<CannotFill>().is_some(), "{cause}");
    }
}
