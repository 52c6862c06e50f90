//! The driver refuses to unregister pinned memory. The memory then stays mapped: the driver would
//! take another mapping at its address for pinned memory.

use std::time::Duration;

use terrane_core::{
    Allocate, ByteCount, Capability, CapabilityStatus, HostAddress, Memory, RegionRequest,
    Requirement,
};
use terrane_cuda::{Context, PinnedAllocator, PinnedMemory, PinnedOptions};
use terrane_testkit::process::in_child;
use terrane_testkit::simulated_cuda::{Live, SimulatedCuda};

use crate::needs::{LITTLE, device};

const TIMEOUT: Duration = Duration::from_secs(60);
const CHUNK: ByteCount = ByteCount::mib(2);
const LENGTH: ByteCount = ByteCount::mib(6);
const UNREGISTER: &str = "cuMemHostUnregister";
/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
const CAPTURING: u32 = 900;

fn in_chunks(context: &Context) -> PinnedAllocator {
    let options = PinnedOptions {
        registration: Requirement::Required,
        largest_registration: CHUNK,
        background_step: CHUNK,
        ..PinnedOptions::default()
    };
    PinnedAllocator::new(context, options).unwrap()
}

fn at_once(pinned: &PinnedAllocator) -> PinnedMemory {
    pinned.allocate(&RegionRequest::new(LENGTH)).unwrap()
}

fn in_background(pinned: &PinnedAllocator) -> PinnedMemory {
    let request = RegionRequest::new(LENGTH);
    let (memory, bring_up) = pinned.allocate_in_background(&request).unwrap();
    assert!(bring_up.wait_for(LENGTH, TIMEOUT).unwrap());
    memory
}

/// Whether every byte is mapped in this process.
fn is_mapped(address: HostAddress, length: ByteCount) -> bool {
    let (mut at, end) = (address.get(), address.get() + length.get());
    for line in std::fs::read_to_string("/proc/self/maps").unwrap().lines() {
        let span = line.split(' ').next().and_then(|span| span.split_once('-')).unwrap();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let (from, to) = (number(span.0), number(span.1));
        if (from..to).contains(&at) {
            at = to;
        }
    }
    at >= end
}

fn overlap(one: HostAddress, other: HostAddress) -> bool {
    one.get().abs_diff(other.get()) < LENGTH.get()
}

#[test]
fn memory_that_cannot_be_unregistered_stays_mapped() {
    let name = "unregistered::memory_that_cannot_be_unregistered_stays_mapped";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
        let pinned = in_chunks(&context);
        for (round, allocate) in (1..).zip([at_once, in_background]) {
            let memory = allocate(&pinned);
            let address = memory.address();
            driver.fail(UNREGISTER, 1, CAPTURING);
            drop(memory);
            assert_eq!(driver.clear_faults(), 0);
            assert!(is_mapped(address, LENGTH), "the driver still has the second chunk");
            let registered = context.usage().registered;
            assert_eq!((context.failed_drops(), driver.count(Live::Pinned)), (round, round));
            assert_eq!(registered.count, round);
            assert_eq!(registered.bytes, CHUNK.checked_mul("chunks", round).unwrap());
            // The next memory is elsewhere, and all of it is registered.
            let next = allocate(&pinned);
            assert!(!overlap(next.address(), address));
            let report = next.capabilities();
            let status = report.status(&Capability::HostRegistration);
            assert_eq!(status, Some(&CapabilityStatus::Granted), "{report}");
            assert_eq!(context.usage().registered.count, round + 3);
        }
        assert_eq!((context.lost(), context.failed_drops()), (None, 2));
    });
}

/// The second chunk is refused, and the first cannot be unregistered.
#[test]
fn a_refused_registration_that_cannot_be_undone_stays_mapped() {
    let name = "unregistered::a_refused_registration_that_cannot_be_undone_stays_mapped";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
        let pinned = in_chunks(&context);
        driver.fail("cuMemHostRegister_v2", 1, 2);
        driver.fail(UNREGISTER, 0, CAPTURING);
        assert!(pinned.allocate(&RegionRequest::new(LENGTH)).is_err());
        assert_eq!(driver.clear_faults(), 0);
        assert_eq!((context.failed_drops(), driver.count(Live::Pinned)), (1, 1));
        assert_eq!(context.usage().registered.count, 1);
        let next = at_once(&pinned);
        assert_eq!(context.usage().registered.count, 4);
        drop(next);
        assert_eq!((context.lost(), context.failed_drops()), (None, 1));
    });
}

/// A lost context runs no more copies, so its memory is unmapped.
#[test]
fn memory_of_a_lost_context_is_unmapped() {
    let name = "unregistered::memory_of_a_lost_context_is_unmapped";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let Some(driver) = SimulatedCuda::find_or_skip(name) else { return };
        let pinned = in_chunks(&context);
        let memories = [at_once(&pinned), in_background(&pinned)];
        driver.refuse(UNREGISTER, 719);
        for memory in memories {
            let address = memory.address();
            drop(memory);
            assert!(!is_mapped(address, LENGTH));
        }
        driver.clear_faults();
        assert_eq!(context.usage().registered.count, 0);
        assert!(context.lost().is_some());
    });
}
