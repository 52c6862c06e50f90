//! Checks the blocks of an upstream: overlaps, writes out of bounds.
//!
//! A debugging aid: every allocation and every free takes one lock and searches an ordered map.

mod canary;
mod live_ranges;
mod log;
mod violation;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Limits, Location, Memory, RegionRequest, Span,
    StorageKind,
};

use crate::adaptors::debug::poison::{Fill, FillHost};
use crate::streams::fence::StreamId;
use crate::sync::Mutex;
pub use canary::OverwrittenSide;
use canary::{CanaryAccess, Frame};
pub use log::GuardLog;
use log::LiveBlockEntry;
pub use violation::GuardViolation;

/// An upstream whose blocks are checked.
///
/// - A block that overlaps a live block is not returned. The request fails, and the block is
///   kept until the guard drops, because freeing the block might free the other.
/// - Host memory is between canaries of 64 bytes, and so is memory that the guard can
///   [access in the order of a stream](Self::ordered). Canaries are checked when the block drops
///   and on [`verify`](Self::verify). Such a block is exactly as long as its request, even if the
///   upstream rounds up. The first byte after it belongs to the canary.
///
/// Violations are recorded in a [`GuardLog`] and traced as errors.
pub struct Guard<A: Allocate> {
    upstream: A,
    log: GuardLog,
    access: CanaryAccess,
    /// Overlapping blocks of the upstream, kept until the guard drops.
    quarantine: Mutex<Vec<A::Memory>>,
}

impl<A: Allocate> Guard<A> {
    /// Checks the blocks of `upstream`, with canaries if it has host memory.
    #[must_use]
    pub fn new(upstream: A) -> Self {
        Self::ordered(upstream, FillHost, StreamId::new(0))
    }

    /// Checks the blocks of `upstream`. `fill` writes and reads the canaries, in the order of
    /// `stream`. A write out of bounds on another stream is missed if it runs after the block
    /// drops. Synchronise with such streams before the drop.
    #[must_use]
    pub fn ordered(upstream: A, fill: impl Fill, stream: StreamId) -> Self {
        Self::through(upstream, Arc::new(fill), stream)
    }

    /// Like [`ordered`](Self::ordered), with a `fill` that others share.
    pub(super) fn through(upstream: A, fill: Arc<dyn Fill>, stream: StreamId) -> Self {
        let access = CanaryAccess { fill, stream };
        let log = GuardLog::new(access.clone());
        Self { upstream, log, access, quarantine: Mutex::new(Vec::new()) }
    }

    /// Returns the log of violations.
    #[must_use]
    pub fn log(&self) -> &GuardLog {
        &self.log
    }

    /// Checks the canaries of every live block, and returns the number of violations.
    pub fn verify(&self) -> usize {
        self.log.verify()
    }

    /// Returns the frame of the block, and the resulting request to the upstream.
    fn frame(&self, request: &RegionRequest) -> Result<Option<Frame>, AllocateError> {
        if request.bytes.is_zero() || !self.access.reaches(self.kind()) {
            return Ok(None);
        }
        let limits = self.upstream.limits();
        Frame::new(request.bytes, limits.alignment.max(request.alignment))
            .map(Some)
            .map_err(|overflow| AllocateError::backend(self.kind(), request, overflow))
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Guard<A> {
    type Memory = Guarded<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    /// The upstream's limits. Canaries reduce the largest region, and lengths between canaries are
    /// not rounded up.
    fn limits(&self) -> Limits {
        let limits = self.upstream.limits();
        let canaries = Frame::new(ByteCount::ZERO, limits.alignment)
            .ok()
            .filter(|_| self.access.reaches(self.kind()));
        let largest_region = limits.largest_region.map(|largest| match canaries {
            Some(frame) => largest.checked_sub(frame.whole).unwrap_or(ByteCount::ZERO),
            None => largest,
        });
        let granule = if canaries.is_some() { Alignment::BYTE } else { limits.granule };
        Limits { largest_region, granule, ..limits }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let frame = self.frame(request)?;
        let requested = RegionRequest {
            bytes: frame.map_or(request.bytes, |frame| frame.whole),
            // A frame shifts the block, and so the position from which pieces are counted.
            unit: if frame.is_some() { ByteCount::ZERO } else { request.unit },
            ..request.clone()
        };
        let memory = self.upstream.allocate(&requested)?;
        let broken_promise = |violation| AllocateError::backend(self.kind(), request, violation);
        let granted = Span::of(&memory);
        let block = match &frame {
            None => Some(granted),
            Some(frame) => frame.cut(&granted),
        };
        let is_fit = granted.length >= requested.bytes
            && granted.location.alignment() >= requested.alignment
            && granted.kind == self.kind();
        let Some(block) = block.filter(|_| is_fit) else {
            let violation = GuardViolation::Unfit { granted, requested };
            self.log.report(violation.clone());
            return Err(broken_promise(violation));
        };
        match self.log.enter(&memory, block, frame.as_ref(), &request.label) {
            Ok(entry) => {
                let offset = frame.map_or(ByteCount::ZERO, |frame| frame.offset);
                Ok(Guarded { entry, memory, offset })
            }
            Err(violation) => {
                self.quarantine.lock().push(memory);
                Err(broken_promise(*violation))
            }
        }
    }
}

impl<A: Allocate + fmt::Debug> fmt::Debug for Guard<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("upstream", &self.upstream)
            .field("violations", &self.log.found())
            .finish_non_exhaustive()
    }
}

/// Memory from [`Guard`].
pub struct Guarded<M> {
    // Fields drop in this order: the canaries are read while the memory is still alive.
    entry: LiveBlockEntry,
    memory: M,
    /// The start of the block within the upstream's memory.
    offset: ByteCount,
}

// SAFETY: the block is the memory, or the part of it between its canaries. `allocate` has checked
// that the part is within the memory. Every other method returns the memory's value.
unsafe impl<M: Memory> Memory for Guarded<M> {
    fn kind(&self) -> StorageKind {
        self.memory.kind()
    }

    fn location(&self) -> Location {
        self.entry.block().location
    }

    fn length(&self) -> ByteCount {
        self.entry.block().length
    }

    terrane_core::delegate_part!(self, self.memory, self.offset);

    fn managed_block(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.memory.managed_block()
    }
}

impl<M: fmt::Debug> fmt::Debug for Guarded<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::DeviceAddress;
    use terrane_testkit::simulated::{Simulated, SimulatedOptions};

    /// Returns the same address on every call.
    #[derive(Debug)]
    struct Confused(Simulated);

    #[derive(Debug)]
    struct Same(StorageKind, ByteCount);

    // SAFETY: a span of a simulated device, which has no bytes.
    unsafe impl Memory for Same {
        fn kind(&self) -> StorageKind {
            self.0
        }
        fn location(&self) -> Location {
            let StorageKind::Device(device) = self.0 else { panic!("{} is no device", self.0) };
            Location::Device { device, address: DeviceAddress::new(0x1000) }
        }
        fn length(&self) -> ByteCount {
            self.1
        }
    }

    // SAFETY: only the test accesses the memory.
    unsafe impl Allocate for Confused {
        type Memory = Same;

        fn kind(&self) -> StorageKind {
            self.0.kind()
        }
        fn limits(&self) -> Limits {
            self.0.limits()
        }
        fn allocate(&self, request: &RegionRequest) -> Result<Same, AllocateError> {
            Ok(Same(self.kind(), request.bytes.min(ByteCount::new(64))))
        }
    }

    fn request(bytes: u64) -> RegionRequest {
        RegionRequest::new(ByteCount::new(bytes)).labelled("test")
    }

    #[test]
    fn an_upstream_that_breaks_its_contract_is_caught() {
        let guard = Guard::new(Confused(Simulated::new(SimulatedOptions::default())));
        let held = guard.allocate(&request(64)).unwrap();
        assert!(matches!(guard.allocate(&request(1)), Err(AllocateError::Backend { .. })));
        assert!(matches!(guard.log().violations()[0], GuardViolation::Overlap { .. }));
        drop(held);
        guard.allocate(&request(65)).unwrap_err();
        assert!(matches!(guard.log().violations()[1], GuardViolation::Unfit { .. }));
        assert!(guard.allocate(&request(64)).is_ok());
        assert_eq!((guard.log().found(), guard.log().live()), (2, 0));
    }
}
