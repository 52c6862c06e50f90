//! Backends that break one rule each. The suites must detect every one of them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use terrane_core::{
    Allocate, AllocateError, ByteCount, Limits, Location, Memory, RegionRequest, StorageKind,
};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind};
use terrane_testkit::conformance::{AllocatorFixture, EngineFixture};
use terrane_testkit::conformance::{allocator, copy_engine, memory};
use terrane_testkit::memory::{HeapAllocator, HeapMemory};
use terrane_testkit::pattern::InProcess;
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Endpoint, OnlyPath, Quote, Side, TransferOptions,
    TransferPlan,
};

/// The message of the panic with which `check` ends.
#[track_caller]
pub fn detected(check: impl FnOnce()) -> String {
    let panic =
        catch_unwind(AssertUnwindSafe(check)).expect_err("the broken rule was not detected");
    match panic.downcast_ref::<String>() {
        Some(message) => message.clone(),
        None => (*panic.downcast_ref::<&str>().unwrap()).to_owned(),
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    SkipsLastRun,
    CopiesOneByteMore,
    CopiesBackwards,
    WritesTheSource,
    DropsEveryJob,
    TakesEveryKind,
    IgnoresDeadlines,
    /// It declines every transfer as broken-up pieces.
    DeclinesPieces,
    /// It ends the job as cancelled before the start, although it has copied.
    NeverStarts,
}

/// Copies like a correct engine, with one error.
#[derive(Debug)]
struct Broken(Wrong);

// SAFETY: none; breaking the contract is its purpose. It only accesses bytes of the two layouts,
// which only the test uses.
unsafe impl CopyEngine for Broken {
    fn name(&self) -> &'static str {
        "broken"
    }

    fn quote(&self, plan: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        let host = plan.source().kind().is_host() && plan.destination().kind().is_host();
        if !host && self.0 != Wrong::TakesEveryKind {
            return Err(Declined::Kinds);
        }
        if self.0 == Wrong::DeclinesPieces {
            return Err(Declined::BrokenPieces);
        }
        Ok(Quote::constant(Default::default(), &OnlyPath { path: "broken", reason: "none" }))
    }

    fn submit(&self, job: CopyJob) {
        if self.0 != Wrong::NeverStarts {
            job.start();
        }
        let deadline = job.options().deadline;
        if deadline.is_some() && self.0 != Wrong::IgnoresDeadlines {
            return job.finish(Err(terrane_transfer::CopyFailure::DeadlineExceeded));
        }
        if self.0 == Wrong::DropsEveryJob {
            return drop(job);
        }
        let plan = job.plan();
        let host = |run, side| {
            let Some(Location::Host(address)) = plan.location(run, side) else { panic!("host") };
            address.as_ptr()
        };
        let skipped = usize::from(self.0 == Wrong::SkipsLastRun);
        for run in plan.runs().iter().rev().skip(skipped) {
            let (from, to) = (host(run, Side::Source), host(run, Side::Destination));
            let mut bytes = run.bytes().to_usize();
            let end = run.destination().offset + run.bytes().get();
            let layout = plan.destination().layout();
            if self.0 == Wrong::CopiesOneByteMore && end < layout.geometry().region_bytes(0).get() {
                bytes += 1;
            }
            for byte in 0..bytes {
                let there = if self.0 == Wrong::CopiesBackwards { bytes - 1 - byte } else { byte };
                // SAFETY: within the regions, which only this test uses.
                let value = unsafe { from.wrapping_add(byte).read() };
                // SAFETY: as above.
                unsafe { to.wrapping_add(there).write(value) };
            }
            if self.0 == Wrong::WritesTheSource {
                // SAFETY: within the regions, which only this test uses.
                unsafe { from.write(0x5A) };
            }
            job.progress().add(run.bytes());
        }
        job.finish(match self.0 {
            Wrong::NeverStarts => Err(terrane_transfer::CopyFailure::Cancelled),
            _ => Ok(()),
        });
    }
}

impl EngineFixture for Broken {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        Arc::new(Self(self.0))
    }

    fn ends(&self) -> &[&'static str] {
        &["host"]
    }

    fn endpoint(&self, _: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let allocator = HeapAllocator::system();
        let builder = LayoutBuilder::new(config).kind(kind).allocate(&allocator);
        Endpoint::new(builder.unregistered().build().unwrap()).unwrap()
    }

    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        let allocator = HeapAllocator::simulated_device(8);
        let builder = LayoutBuilder::new(config).fully_contiguous().allocate(&allocator);
        Some(Endpoint::new(builder.unregistered().build().unwrap()).unwrap())
    }

    /// It has no device.
    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        None
    }

    fn least_relayouts(&self) -> usize {
        1
    }
}

#[test]
fn engines_that_copy_wrongly_are_detected() {
    let exact =
        |wrong| detected(|| copy_engine::bytes_are_exact_and_neighbours_untouched(&Broken(wrong)));
    let message = exact(Wrong::SkipsLastRun);
    assert!(message.contains("destination, fully contiguous in system"), "{message}");
    assert!(exact(Wrong::CopiesOneByteMore).contains("destination"));
    assert!(exact(Wrong::CopiesBackwards).contains("destination"));
    assert!(exact(Wrong::WritesTheSource).contains("source,"));
    let skips = Broken(Wrong::SkipsLastRun);
    let message =
        detected(|| copy_engine::layers_are_complete_when_the_engine_reports_them(&skips));
    assert!(message.contains("differs"), "{message}");
    let message = detected(|| {
        copy_engine::relayouts_are_exact_or_declined(&skips, 1, 12);
    });
    assert!(message.contains("destination"), "{message}");
    // A decline is no error. The suite compares the number with the fixture's.
    let relayouts = |wrong| copy_engine::relayouts_are_exact_or_declined(&Broken(wrong), 1, 12);
    assert_eq!(relayouts(Wrong::DeclinesPieces), 0);
    assert!(relayouts(Wrong::IgnoresDeadlines) > 8);
}

#[test]
fn engines_with_wrong_results_are_detected() {
    let broken = Broken(Wrong::DropsEveryJob);
    detected(|| copy_engine::reports_match_the_copy(&broken));
    detected(|| copy_engine::a_transfer_of_no_blocks_succeeds(&broken));
    let message = detected(|| {
        copy_engine::unsupported_kinds_are_declined(&Broken(Wrong::TakesEveryKind));
    });
    assert!(message.contains("from system to device 8"), "{message}");
    let message = detected(|| {
        copy_engine::a_deadline_in_the_past_ends_the_transfer(&Broken(Wrong::IgnoresDeadlines));
    });
    assert!(message.contains("the deadline had passed before the transfer began"), "{message}");
    // It starts every job before it looks at the deadline.
    let message = detected(|| {
        copy_engine::a_deadline_in_the_past_ends_the_transfer(&Broken(Wrong::SkipsLastRun));
    });
    assert!(message.contains("late before its start"), "{message}");
    let message = detected(|| {
        copy_engine::the_outcome_of_a_cancelled_transfer_is_true(&Broken(Wrong::NeverStarts));
    });
    assert!(message.contains("after a cancel before the start"), "{message}");
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    TooShort,
    Misaligned,
    WrongKind,
    SameTwice,
    RefusesZero,
    IgnoresGranule,
}

/// Allocates like a correct allocator, with one error.
struct BrokenAllocator {
    fault: Fault,
    heap: HeapAllocator,
    before: Mutex<Option<Arc<HeapMemory>>>,
}

#[derive(Debug)]
struct BrokenMemory {
    memory: Arc<HeapMemory>,
    skipped: ByteCount,
    length: ByteCount,
    kind: StorageKind,
}

// SAFETY: a part of memory that this value keeps alive.
unsafe impl Memory for BrokenMemory {
    fn kind(&self) -> StorageKind {
        self.kind
    }

    fn location(&self) -> Location {
        self.memory.location().checked_add(self.skipped).unwrap()
    }

    fn length(&self) -> ByteCount {
        self.length
    }
}

// SAFETY: none; the suite must detect the error before it accesses a byte.
unsafe impl Allocate for BrokenAllocator {
    type Memory = BrokenMemory;

    fn kind(&self) -> StorageKind {
        self.heap.kind()
    }

    fn limits(&self) -> Limits {
        let granule = if self.fault == Fault::IgnoresGranule {
            terrane_core::Alignment::PAGE
        } else {
            terrane_core::Alignment::BYTE
        };
        Limits { granule, ..Limits::NONE }
    }

    fn allocate(&self, request: &RegionRequest) -> Result<BrokenMemory, AllocateError> {
        let one_more = request.bytes.checked_add(ByteCount::new(1));
        let refusal = AllocateError::Closed { kind: self.kind(), label: request.label.clone() };
        if self.fault == Fault::RefusesZero && request.bytes.is_zero() {
            return Err(refusal);
        }
        let Ok(bytes) = one_more else { return Err(refusal) };
        let mut before = self.before.lock().unwrap();
        let fresh = Arc::new(self.heap.allocate(&RegionRequest { bytes, ..request.clone() })?);
        let memory = match before.take() {
            Some(last) if self.fault == Fault::SameTwice && last.length() >= bytes => last,
            _ => fresh,
        };
        *before = Some(Arc::clone(&memory));
        drop(before);
        let (one, length) = (ByteCount::new(1), request.bytes);
        Ok(BrokenMemory {
            memory,
            skipped: if self.fault == Fault::Misaligned { one } else { ByteCount::ZERO },
            length: if self.fault == Fault::TooShort {
                length.checked_sub(one).unwrap_or(length)
            } else {
                length
            },
            kind: match self.fault {
                Fault::WrongKind => StorageKind::Disk,
                _ => StorageKind::System,
            },
        })
    }
}

impl AllocatorFixture for Fault {
    type Allocator = BrokenAllocator;

    fn allocator(&self) -> BrokenAllocator {
        let heap = HeapAllocator::system();
        BrokenAllocator { fault: *self, heap, before: Mutex::default() }
    }

    fn live(&self, allocator: &BrokenAllocator) -> Option<u64> {
        Some(allocator.heap.live())
    }
}

#[test]
fn allocators_that_break_a_rule_are_detected() {
    detected(|| allocator::memory_has_the_requested_properties(&Fault::TooShort));
    detected(|| allocator::memory_has_the_requested_properties(&Fault::Misaligned));
    detected(|| allocator::memory_has_the_requested_properties(&Fault::WrongKind));
    detected(|| allocator::nothing_overlaps(&Fault::SameTwice));
    detected(|| allocator::zero_bytes_are_a_request_like_any_other(&Fault::RefusesZero));
    detected(|| allocator::limits_are_kept(&Fault::IgnoresGranule));
    // It leaks the last allocation.
    let message = detected(|| allocator::dropping_frees(&Fault::SameTwice));
    assert!(message.contains("still live"), "{message}");
    detected(|| memory::the_location_fits_the_kind(&wrong_kind()));
    // All other properties are correct.
    memory::bytes_keep_what_is_written(&wrong_kind(), &InProcess);
}

fn wrong_kind() -> BrokenMemory {
    let request = RegionRequest::new(ByteCount::new(100));
    Fault::WrongKind.allocator().allocate(&request).unwrap()
}
