//! Watches over what an upstream hands out: overlaps, writes out of bounds, stale references.
//!
//! A debugging aid: every allocation and every free takes one lock and searches an ordered map.

mod canary;
mod log;
mod violation;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, CapabilityReport, DeviceAddress, Limits,
    Location, Memory, RegionRequest, RegistrationRecord, Span, StorageKind,
};

use super::limit::size_overflow;
use super::{Fill, FillHost};
use crate::StreamId;
use crate::sync::Mutex;
pub use canary::Side;
use canary::{Frame, Reach};
use log::Entry;
pub use log::GuardLog;
pub use violation::{GuardViolation, StaleReference};

/// An upstream that is watched.
///
/// - A block that overlaps a live one is not handed out. The request fails, and the block is kept
///   until the guard drops, as giving it back might free the other.
/// - Blocks of host memory, and of what else the guard was given a way to [reach](Self::ordered),
///   lie between canaries of 64 bytes, which are checked when the block goes and on
///   [`verify`](Self::verify). Such a block is exactly as long as was asked for, whatever the
///   upstream rounds up to: the first byte behind what was asked for is the canary's.
/// - Each block has a generation, by which [`check`](Self::check) tells a reference to it from a
///   stale one to an earlier block at the same place.
///
/// Violations are entered in a [`GuardLog`] and traced as errors.
pub struct Guard<A: Allocate> {
    upstream: A,
    log: GuardLog,
    reach: Reach,
    /// Blocks that the upstream should not have handed out.
    quarantine: Mutex<Vec<A::Memory>>,
}

impl<A: Allocate> Guard<A> {
    /// Watches over what `upstream` hands out, with canaries if that is the host's memory.
    #[must_use]
    pub fn new(upstream: A) -> Self {
        Self::ordered(upstream, FillHost, StreamId::new(0))
    }

    /// Watches over what `upstream` hands out, with canaries that are written and read by means of
    /// `fill`, in the order of `stream`. Writes out of bounds that other streams are still to make
    /// when the block goes are not seen: have them waited for before.
    #[must_use]
    pub fn ordered(upstream: A, fill: impl Fill, stream: StreamId) -> Self {
        let reach = Reach { fill: Arc::new(fill), stream };
        let log = GuardLog::new(reach.clone());
        Self { upstream, log, reach, quarantine: Mutex::new(Vec::new()) }
    }

    /// What has been found.
    #[must_use]
    pub fn log(&self) -> &GuardLog {
        &self.log
    }

    /// Checks the canaries of every live block, and says how many violations there were.
    pub fn verify(&self) -> usize {
        self.log.verify()
    }

    /// Checks that `length` bytes at `location` lie within the live block of this generation.
    ///
    /// # Errors
    ///
    /// [`StaleReference`] if the block is gone, has been replaced, or is shorter.
    pub fn check(
        &self,
        location: Location,
        length: ByteCount,
        generation: u64,
    ) -> Result<(), StaleReference> {
        self.log.check(location, length, generation)
    }

    /// How the block is framed, and the request to the upstream that this comes to.
    fn frame(&self, request: &RegionRequest) -> Result<Option<Frame>, AllocateError> {
        if request.bytes.is_zero() || !self.reach.reaches(self.kind()) {
            return Ok(None);
        }
        let limits = self.upstream.limits();
        Frame::new(request.bytes, limits.alignment.max(request.alignment))
            .map(Some)
            .map_err(|overflow| size_overflow(self.kind(), request, overflow))
    }
}

// SAFETY: the memory is the upstream's, which hands it to nobody else.
unsafe impl<A: Allocate> Allocate for Guard<A> {
    type Memory = Guarded<A::Memory>;

    fn kind(&self) -> StorageKind {
        self.upstream.kind()
    }

    /// The upstream's; of the largest region, the canaries take their part, and lengths between
    /// canaries are not rounded up.
    fn limits(&self) -> Limits {
        let limits = self.upstream.limits();
        let canaries = Frame::new(ByteCount::ZERO, limits.alignment)
            .ok()
            .filter(|_| self.reach.reaches(self.kind()));
        let largest_region = limits.largest_region.map(|largest| match canaries {
            Some(frame) => largest.checked_sub(frame.whole).unwrap_or(ByteCount::ZERO),
            None => largest,
        });
        let granule = if canaries.is_some() { Alignment::BYTE } else { limits.granule };
        Limits { largest_region, granule, ..limits }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let frame = self.frame(request)?;
        let asked = RegionRequest {
            bytes: frame.map_or(request.bytes, |frame| frame.whole),
            // A frame moves the pieces from where they are counted.
            unit: if frame.is_some() { ByteCount::ZERO } else { request.unit },
            ..request.clone()
        };
        let memory = self.upstream.allocate(&asked)?;
        let broken_promise = |violation: Box<GuardViolation>| AllocateError::Backend {
            kind: self.kind(),
            requested: request.bytes,
            label: request.label.clone(),
            source: violation,
        };
        let granted = Span::of(&memory);
        let block = match &frame {
            None => Some(granted),
            Some(frame) => frame.cut(&granted),
        };
        let is_fit = granted.length >= asked.bytes
            && granted.location.alignment() >= asked.alignment
            && granted.kind == self.kind();
        let Some(block) = block.filter(|_| is_fit) else {
            let violation = GuardViolation::Unfit { granted, asked };
            self.log.report(violation.clone());
            return Err(broken_promise(Box::new(violation)));
        };
        match self.log.enter(&memory, block, frame.as_ref(), &request.label) {
            Ok(entry) => {
                let offset = frame.map_or(ByteCount::ZERO, |frame| frame.offset);
                Ok(Guarded { entry, memory, offset })
            }
            Err(violation) => {
                self.quarantine.lock().push(memory);
                Err(broken_promise(violation))
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

/// What [`Guard`] hands out.
pub struct Guarded<M> {
    // Fields drop in this order: the canaries are read while the memory is still there.
    entry: Entry,
    memory: M,
    /// Where the block begins within the upstream's memory.
    offset: ByteCount,
}

impl<M> Guarded<M> {
    /// The block's generation, which no other block of this guard has.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.entry.generation()
    }
}

// SAFETY: the block is the memory, or the part of it between its canaries, which `allocate` has
// checked to lie within it; everything else is the memory's answer.
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

    fn device_alias(&self) -> Option<DeviceAddress> {
        self.memory.device_alias()?.checked_add(self.offset)
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        let within = self.offset.checked_add(offset).ok()?;
        let left = self.length().checked_sub(offset).unwrap_or(ByteCount::ZERO);
        Some(self.memory.copyable_from(within)?.min(left))
    }

    fn capabilities(&self) -> CapabilityReport {
        self.memory.capabilities()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        self.memory.visit_registrations(visit);
    }

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
    use crate::adaptors::{Simulated, SimulatedOptions};
    use terrane_core::DeviceAddress;

    /// Hands out the same address again and again.
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

    // SAFETY: what is handed out is the test's alone.
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

    #[test]
    fn stale_references_are_told_from_live_ones() {
        let guard = Guard::new(Confused(Simulated::new(SimulatedOptions::default())));
        let first = guard.allocate(&request(64)).unwrap();
        let (location, generation) = (first.location(), first.generation());
        let bytes = ByteCount::new;
        guard.check(location, bytes(64), generation).unwrap();
        let inside = location.checked_add(bytes(60)).unwrap();
        let beyond = guard.check(inside, bytes(5), generation).unwrap_err();
        assert!(matches!(beyond, StaleReference::OutOfBounds { .. }), "{beyond}");
        drop(first);
        let gone = guard.check(location, bytes(1), generation).unwrap_err();
        assert_eq!(gone, StaleReference::NotLive { location });
        let second = guard.allocate(&request(64)).unwrap();
        let stale = guard.check(location, bytes(1), generation).unwrap_err();
        assert!(
            matches!(stale, StaleReference::Generation { live, .. } if live == second.generation())
        );
    }
}
