//! The guarantees of system memory.

use std::num::NonZeroUsize;
use std::time::Duration;

use terrane_core::{
    Alignment, Allocate, AllocateError, ByteCount, Capability, CapabilityStatus, HostAddress,
    Memory, RegionRequest, Requirement, StorageKind,
};
use terrane_storage::{
    FirstTouch, HugePageSize, HugePages, NodeId, NumaPolicy, Progress, StorageError,
    SystemAllocator, SystemMemory, SystemOptions,
};
use terrane_testkit::leaks::FREES_AT_ONCE;
use terrane_testkit::process::{in_child, in_child_with, in_fork};

use crate::support::{assert_leaks_nothing, count};

fn allocator(huge_pages: HugePages) -> SystemAllocator {
    SystemAllocator::new(SystemOptions { huge_pages, ..SystemOptions::default() })
}

fn address(memory: &SystemMemory) -> HostAddress {
    memory.location().as_host().unwrap()
}

#[test]
fn memory_is_zeroed_writable_and_aligned() {
    for huge_pages in [
        HugePages::None,
        HugePages::Transparent(Requirement::Preferred),
        HugePages::Explicit(HugePageSize::Mib2, Requirement::Preferred),
    ] {
        for (bytes, alignment) in [(1, 0), (5000, 12), (3 << 20, 9), (3 << 20, 25), (70_000, 30)] {
            let alignment = Alignment::new(1 << alignment).unwrap();
            let request = RegionRequest::new(count(bytes)).aligned_to(alignment);
            let memory = allocator(huge_pages).allocate(&request).unwrap();
            assert_eq!(memory.kind(), StorageKind::System);
            assert!(memory.length() >= count(bytes));
            assert!(memory.location().alignment() >= alignment);
            let length = memory.length().to_usize();
            // SAFETY: the memory is live and initialised, and only this test uses it.
            let all = unsafe { std::slice::from_raw_parts_mut(address(&memory).as_ptr(), length) };
            assert!(all.iter().all(|&byte| byte == 0));
            all.fill(0xff);
        }
    }
}

#[test]
fn zero_bytes_map_nothing() {
    let request = RegionRequest::new(ByteCount::ZERO).aligned_to(Alignment::HUGE_PAGE);
    let memory = allocator(HugePages::default()).allocate(&request).unwrap();
    assert_eq!(memory.length(), ByteCount::ZERO);
    assert!(memory.location().alignment() >= Alignment::HUGE_PAGE);
    assert_eq!(memory.huge_bytes(), Ok(ByteCount::ZERO));
}

#[test]
fn impossible_requests_are_typed() {
    let allocator = allocator(HugePages::default());
    let strict = RegionRequest::new(count(1)).aligned_to(Alignment::new(1 << 31).unwrap());
    assert!(matches!(allocator.allocate(&strict), Err(AllocateError::TooStrictlyAligned { .. })));
    for bytes in [1 << 50, u64::MAX] {
        let error = allocator.allocate(&RegionRequest::new(count(bytes))).unwrap_err();
        assert!(error.is_exhaustion(), "{error:?}");
        let AllocateError::OutOfMemory { available, .. } = error else { panic!("{error:?}") };
        assert!(available.is_some_and(|available| available < count(bytes)));
    }
    // Without first touch, only the kernel can refuse.
    let options = SystemOptions { first_touch: FirstTouch::None, ..SystemOptions::default() };
    let error = SystemAllocator::new(options).allocate_memory(&RegionRequest::new(count(1 << 50)));
    assert!(matches!(error, Err(StorageError::OutOfMemory { source: Some(_), .. })));
}

/// The report agrees with `smaps`.
#[test]
fn the_report_has_the_number_of_huge_pages() {
    let request = RegionRequest::new(ByteCount::mib(16));
    // The kernel may split or join huge pages between the report and this read, but not every
    // time.
    let looks: Vec<_> = (0..10)
        .map(|_| {
            let allocator = allocator(HugePages::Transparent(Requirement::Preferred));
            let memory = allocator.allocate(&request).unwrap();
            let huge = memory.huge_bytes().unwrap();
            let report = memory.capabilities();
            (report.status(&Capability::TransparentHugePages).unwrap().clone(), huge)
        })
        .collect();
    let agrees = |(status, huge): &(CapabilityStatus, ByteCount)| match status {
        CapabilityStatus::Granted => *huge == ByteCount::mib(16),
        CapabilityStatus::Partial { granted, of } => granted < of,
        CapabilityStatus::Refused(_) => huge.is_zero(),
        other => panic!("{other:?}"),
    };
    assert!(looks.iter().any(agrees), "{looks:?}");

    let memory = allocator(HugePages::None).allocate(&request).unwrap();
    assert_eq!(memory.huge_bytes(), Ok(ByteCount::ZERO));
    assert_eq!(memory.capabilities().status(&Capability::TransparentHugePages), None);

    let small = RegionRequest::new(ByteCount::mib(1));
    let error =
        allocator(HugePages::Transparent(Requirement::Required)).allocate(&small).unwrap_err();
    assert!(matches!(error, AllocateError::Capability { .. }), "{error:?}");
}

#[test]
fn explicit_pages_are_granted_replaced_or_refused() {
    for size in [HugePageSize::Mib2, HugePageSize::Gib1] {
        let request = RegionRequest::new(ByteCount::mib(4));
        let memory =
            allocator(HugePages::Explicit(size, Requirement::Preferred)).allocate(&request);
        let memory = memory.unwrap();
        let report = memory.capabilities();
        let is_granted =
            report.status(&Capability::ExplicitHugePages) == Some(&CapabilityStatus::Granted);
        if is_granted {
            assert_eq!(memory.huge_bytes(), Ok(memory.length()));
        } else {
            assert_eq!(memory.length(), ByteCount::mib(4));
            assert!(report.status(&Capability::TransparentHugePages).is_some());
        }
        drop(memory);
        let required =
            allocator(HugePages::Explicit(size, Requirement::Required)).allocate(&request);
        match required {
            Ok(_) => assert!(is_granted),
            Err(error) => assert!(matches!(error, AllocateError::Capability { .. }), "{error:?}"),
        }
    }
}

#[test]
fn binding_is_granted_refused_or_an_error() {
    let bring_up = |numa| {
        let options = SystemOptions { numa, ..SystemOptions::default() };
        SystemAllocator::new(options).allocate_memory(&RegionRequest::new(ByteCount::mib(40)))
    };
    let node = NodeId::new(0);
    for numa in [
        NumaPolicy::Bind(node, Requirement::Preferred),
        NumaPolicy::Interleave(vec![node], Requirement::Preferred),
    ] {
        let memory = bring_up(numa).unwrap();
        let report = memory.capabilities();
        assert!(report.status(&Capability::NumaBinding).is_some(), "{report}");
    }
    let nowhere = NodeId::new(1000);
    let memory = bring_up(NumaPolicy::Bind(nowhere, Requirement::Preferred)).unwrap();
    let report = memory.capabilities();
    assert!(matches!(report.status(&Capability::NumaBinding), Some(CapabilityStatus::Refused(_))));
    let error = bring_up(NumaPolicy::Bind(nowhere, Requirement::Required)).unwrap_err();
    assert!(matches!(error, StorageError::Capability(_)), "{error:?}");
    let error =
        bring_up(NumaPolicy::Bind(NodeId::new(u32::MAX), Requirement::Required)).unwrap_err();
    assert!(matches!(error, StorageError::Capability(_)), "{error:?}");
}

#[test]
fn progress_can_be_observed_and_cancelled() {
    let progress = Progress::default();
    let options = SystemOptions { huge_pages: HugePages::None, ..SystemOptions::default() };
    let allocator = SystemAllocator::new(options).reporting_to(progress.clone());
    let memory = allocator.allocate_memory(&RegionRequest::new(ByteCount::mib(64))).unwrap();
    assert_eq!((progress.ready(), progress.total()), (memory.length(), memory.length()));

    progress.cancel();
    let error = allocator.allocate_memory(&RegionRequest::new(ByteCount::mib(64))).unwrap_err();
    assert!(matches!(error, StorageError::Cancelled { .. }), "{error:?}");
    assert_eq!(progress.ready(), memory.length(), "the failed attempt was subtracted");
}

#[test]
fn cancelling_in_the_middle_ends_the_allocation() {
    // On a busy machine the allocation can end before the other thread cancels it.
    let attempts = (0..200).map(|_| cancel_in_the_middle());
    let cancelled = attempts.filter_map(Result::err).next();
    let Some(StorageError::Cancelled { ready, of }) = cancelled else { panic!("{cancelled:?}") };
    assert!(!ready.is_zero() && ready < of);
}

fn cancel_in_the_middle() -> Result<SystemMemory, StorageError> {
    let progress = Progress::default();
    let options = SystemOptions {
        huge_pages: HugePages::None,
        first_touch: FirstTouch::Threads(NonZeroUsize::MIN),
        ..SystemOptions::default()
    };
    let allocator = SystemAllocator::new(options).reporting_to(progress.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while progress.ready().is_zero() {
                std::thread::sleep(Duration::from_micros(100));
            }
            progress.cancel();
        });
        allocator.allocate_memory(&RegionRequest::new(ByteCount::mib(512)))
    })
}

#[test]
fn nothing_stays_mapped_after_any_outcome() {
    in_child_with("system::nothing_stays_mapped_after_any_outcome", &FREES_AT_ONCE, || {
        let request = RegionRequest::new(ByteCount::mib(32)).aligned_to(Alignment::HUGE_PAGE);
        assert_leaks_nothing("an allocation", || {
            drop(allocator(HugePages::default()).allocate(&request).unwrap());
        });
        assert_leaks_nothing("an allocation whose alignment is trimmed", || {
            let strict = request.clone().aligned_to(Alignment::new(1 << 30).unwrap());
            drop(allocator(HugePages::None).allocate(&strict).unwrap());
        });
        let cancelled = Progress::default();
        cancelled.cancel();
        assert_leaks_nothing("a cancelled bring-up", || {
            let allocator = allocator(HugePages::None).reporting_to(cancelled.clone());
            allocator.allocate(&request).unwrap_err();
        });
        assert_leaks_nothing("a binding that is refused", || {
            let numa = NumaPolicy::Bind(NodeId::new(1000), Requirement::Required);
            let options = SystemOptions { numa, ..SystemOptions::default() };
            SystemAllocator::new(options).allocate(&request).unwrap_err();
        });
        assert_leaks_nothing("explicit pages that there are not", || {
            let pages = HugePages::Explicit(HugePageSize::Gib1, Requirement::Required);
            let _ = allocator(pages).allocate(&request);
        });
    });
}

/// Long enough for any machine.
const TIMEOUT: Duration = Duration::from_secs(120);

#[test]
fn memory_is_usable_during_its_bring_up() {
    let allocator = SystemAllocator::new(SystemOptions::default());
    let request = RegionRequest::new(ByteCount::mib(150));
    let (memory, bring_up) = allocator.allocate_in_background(&request).unwrap();
    assert_eq!(bring_up.length(), memory.length());
    let address = address(&memory);
    // The last byte: a thread may touch it before or after this write, and does not change it.
    let last = address.checked_add(ByteCount::new(memory.length().get() - 1)).unwrap();
    // SAFETY: the byte is in the memory, which only this test uses.
    unsafe { last.as_ptr().write(7) };
    let mut before = ByteCount::ZERO;
    for step in [ByteCount::mib(1), ByteCount::mib(100), memory.length()] {
        assert!(bring_up.wait_for(step, TIMEOUT).unwrap());
        let usable = bring_up.usable_prefix();
        assert!(usable >= step && usable >= before);
        before = usable;
    }
    assert!(bring_up.wait_for(memory.length(), TIMEOUT).unwrap());
    assert_eq!(bring_up.usable_prefix(), memory.length());
    // SAFETY: as above.
    assert_eq!(unsafe { last.as_ptr().read() }, 7);
    // SAFETY: as above.
    assert_eq!(unsafe { address.as_ptr().read() }, 0);
}

#[test]
fn memory_that_drops_during_its_bring_up_joins_its_thread() {
    let progress = Progress::default();
    let allocator = SystemAllocator::new(SystemOptions::default()).reporting_to(progress.clone());
    let request = RegionRequest::new(ByteCount::mib(200));
    for _ in 0..20 {
        let (memory, bring_up) = allocator.allocate_in_background(&request).unwrap();
        drop(memory);
        // The thread was joined, so its result and its numbers are final.
        if bring_up.is_complete() {
            assert_eq!(bring_up.usable_prefix(), request.bytes);
        } else {
            assert!(bring_up.ended().is_some_and(|ended| ended.cause.is_none()));
        }
        assert_eq!(progress.ready(), progress.total());
    }
    progress.cancel();
    let (memory, bring_up) = allocator.allocate_in_background(&request).unwrap();
    let ended = bring_up.wait_for(ByteCount::mib(200), TIMEOUT).unwrap_err();
    assert!(ended.cause.is_none(), "{ended}");
    assert_eq!(memory.length(), request.bytes, "it can still be used");
    let (empty, bring_up) =
        allocator.allocate_in_background(&RegionRequest::new(ByteCount::ZERO)).unwrap();
    assert!(empty.length().is_zero() && bring_up.is_complete());
}

#[test]
fn a_forked_child_drops_memory_during_its_bring_up() {
    in_child("system::a_forked_child_drops_memory_during_its_bring_up", || {
        let allocator = SystemAllocator::new(SystemOptions::default());
        let request = RegionRequest::new(ByteCount::gib(1));
        let (memory, bring_up) = allocator.allocate_in_background(&request).unwrap();
        let mut memory = Some(memory);
        // The thread of the bring-up does not exist in the child.
        in_fork(|| drop(memory.take()));
        assert!(bring_up.wait_for(request.bytes, TIMEOUT).unwrap());
    });
}

#[test]
fn memory_that_needs_further_steps_is_touched_and_not_ready() {
    for first_touch in [FirstTouch::default(), FirstTouch::None] {
        let progress = Progress::default();
        let seen = || [progress.touched(), progress.ready(), progress.total()];
        let options = SystemOptions { first_touch, ..SystemOptions::default() };
        let allocator = SystemAllocator::new(options).reporting_to(progress.clone());
        let request = RegionRequest::new(ByteCount::mib(40));
        let (memory, entry) = allocator.allocate_unfinished(&request).unwrap();
        let length = memory.length();
        let touched = if first_touch == FirstTouch::None { ByteCount::ZERO } else { length };
        assert_eq!(seen(), [touched, ByteCount::ZERO, length]);
        drop(entry);
        assert_eq!(seen(), [ByteCount::ZERO; 3], "its numbers were subtracted");
        let (_memory, entry) = allocator.allocate_unfinished(&request).unwrap();
        entry.finish();
        assert_eq!(seen(), [length; 3]);
        let nothing = RegionRequest::new(ByteCount::ZERO);
        allocator.allocate_unfinished(&nothing).unwrap().1.finish();
        assert_eq!(seen(), [length; 3]);
    }
}
