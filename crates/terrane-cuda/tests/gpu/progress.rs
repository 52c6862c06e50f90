//! The progress of pinned memory: it reports memory as ready once it is registered, and not before.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use terrane_core::{ByteCount, Memory, RegionRequest, Requirement};
use terrane_cuda::{Context, CudaError, DriverCode, PinnedAllocator, PinnedOptions, ResourceCount};
use terrane_storage::{Progress, StorageError};
use terrane_testkit::events::AtEvents;
use terrane_testkit::process::in_child;
use tracing::Subscriber;

use crate::faults;
use crate::needs::{LITTLE, device};

const TIMEOUT: Duration = Duration::from_secs(120);
const PART: ByteCount = ByteCount::mib(4);
const PARTS: u64 = 6;
const OUT_OF_MEMORY: DriverCode = DriverCode::OUT_OF_MEMORY;

/// Calls a function at each event of pinned memory.
fn at_events(run: impl Fn() + Send + Sync + 'static) -> impl Subscriber + Send + Sync {
    AtEvents::of("terrane_cuda::memory::pinned", move |_| run())
}

/// The touched bytes, the ready bytes, and all bytes.
fn seen(progress: &Progress) -> [ByteCount; 3] {
    [progress.touched(), progress.ready(), progress.total()]
}

fn in_parts(context: &Context, registration: Requirement, progress: &Progress) -> PinnedAllocator {
    let options = PinnedOptions {
        registration,
        largest_registration: PART,
        background_step: PART,
        ..PinnedOptions::default()
    };
    PinnedAllocator::new(context, options).unwrap().reporting_to(progress.clone())
}

fn request() -> RegionRequest {
    RegionRequest::new(PART.checked_mul("parts", PARTS).unwrap())
}

#[test]
fn memory_is_ready_when_all_of_it_is_registered() {
    let name = "memory_is_ready_when_all_of_it_is_registered";
    let Some(context) = device(name, LITTLE) else { return };
    let progress = Progress::default();
    let pinned = in_parts(&context, Requirement::Required, &progress);
    let all = request().bytes;
    for round in 0..2_u64 {
        let before = all.checked_mul("rounds", round).unwrap();
        let during = Arc::new(Mutex::new(Vec::new()));
        let look = {
            let (during, progress) = (Arc::clone(&during), progress.clone());
            at_events(move || during.lock().unwrap().push(seen(&progress)))
        };
        let memory =
            tracing::subscriber::with_default(look, || pinned.allocate_memory(&request()).unwrap());
        let total = before.checked_add(all).unwrap();
        let during = during.lock().unwrap();
        assert_eq!(during.len(), usize::try_from(PARTS).unwrap(), "one for each registration");
        assert!(during.iter().all(|&at| at == [total, before, total]), "{during:?}");
        assert_eq!(seen(&progress), [total; 3]);
        drop(memory);
        assert_eq!(seen(&progress), [total; 3], "ready memory stays ready");
    }
}

#[test]
fn in_the_background_registered_memory_is_ready() {
    let name = "progress::in_the_background_registered_memory_is_ready";
    in_child(name, || {
        let Some(context) = device(name, LITTLE) else { return };
        let progress = Progress::default();
        let during = Arc::new(Mutex::new(Vec::new()));
        let look = {
            let (during, progress) = (Arc::clone(&during), progress.clone());
            at_events(move || during.lock().unwrap().push(progress.ready()))
        };
        // Calls of all threads, because another thread registers.
        tracing::subscriber::set_global_default(look).unwrap();
        let pinned = in_parts(&context, Requirement::Required, &progress);
        let (_memory, bring_up) = pinned.allocate_in_background(&request()).unwrap();
        assert!(bring_up.wait_for(request().bytes, TIMEOUT).unwrap());
        assert_eq!(seen(&progress), [request().bytes; 3]);
        let before = (0..PARTS).map(|part| PART.checked_mul("parts", part).unwrap());
        let during: Vec<ByteCount> = during.lock().unwrap().clone();
        // The last observed event reports that all memory is registered.
        let parts = usize::try_from(PARTS).unwrap();
        assert_eq!(during[..parts], before.collect::<Vec<_>>(), "what was ready before each part");
    });
}

#[test]
fn a_registration_that_fails_half_way_is_never_ready() {
    let name = "a_registration_that_fails_half_way_is_never_ready";
    let Some(context) = device(name, LITTLE) else { return };
    for spared in [0, PARTS / 2, PARTS - 1] {
        let progress = Progress::default();
        let none = [ByteCount::ZERO; 3];
        let fail = |function, spared| faults::fail(name, function, spared, OUT_OF_MEMORY);
        if !fail("cuMemHostRegister_v2", spared) {
            return;
        }
        in_parts(&context, Requirement::Required, &progress)
            .allocate_memory(&request())
            .unwrap_err();
        assert_eq!(seen(&progress), none, "taken back");

        // In the background, too, even if all pages were touched before.
        assert!(fail("cuMemHostRegister_v2", spared));
        let pinned = in_parts(&context, Requirement::Required, &progress);
        let (memory, bring_up) = pinned.allocate_in_background(&request()).unwrap();
        let ended = bring_up.wait_for(request().bytes, TIMEOUT).unwrap_err();
        assert_eq!(ended.usable, PART.checked_mul("parts", spared).unwrap());
        assert_eq!(seen(&progress), none, "taken back");
        drop(memory);

        // The driver allocates the memory, or refuses to.
        let pinned = in_parts(&context, Requirement::Preferred, &progress);
        assert!(fail("cuMemHostRegister_v2", spared) && fail("cuMemHostAlloc", 0));
        pinned.allocate_memory(&request()).unwrap_err();
        assert_eq!(seen(&progress), none, "taken back");
        assert!(fail("cuMemHostRegister_v2", spared));
        let memory = pinned.allocate_memory(&request()).unwrap();
        assert_eq!(seen(&progress), [memory.length(); 3], "and counted once");
    }
    let usage = context.usage();
    assert_eq!(
        (usage.registered, usage.host),
        (ResourceCount::default(), ResourceCount::default())
    );
}

#[test]
fn memory_of_any_kind_is_ready_at_the_end() {
    let name = "memory_of_any_kind_is_ready_at_the_end";
    let Some(context) = device(name, LITTLE) else { return };
    let progress = Progress::default();
    let pinned = in_parts(&context, Requirement::Required, &progress);
    let (memory, bring_up) = pinned.allocate_in_background(&request()).unwrap();
    assert!(bring_up.wait_for(request().bytes, TIMEOUT).unwrap());
    assert_eq!(seen(&progress), [request().bytes; 3]);
    drop(memory);
    let of_driver = in_parts(&context, Requirement::Off, &progress);
    let memory = of_driver.allocate_memory(&request()).unwrap();
    let twice = request().bytes.checked_add(memory.length()).unwrap();
    assert_eq!(seen(&progress), [twice; 3]);
    of_driver.allocate_memory(&RegionRequest::new(ByteCount::ZERO)).unwrap();
    assert_eq!(seen(&progress), [twice; 3]);
}

#[test]
fn a_bring_up_is_cancelled_between_registrations() {
    let name = "a_bring_up_is_cancelled_between_registrations";
    let Some(context) = device(name, LITTLE) else { return };
    let progress = Progress::default();
    let pinned = in_parts(&context, Requirement::Preferred, &progress);
    let look = {
        let progress = progress.clone();
        at_events(move || progress.cancel())
    };
    let error =
        tracing::subscriber::with_default(look, || pinned.allocate_memory(&request()).unwrap_err());
    let CudaError::HostMemory { source } = &error else { panic!("{error}") };
    let StorageError::Cancelled { ready, of } = **source else { panic!("{error}") };
    assert_eq!((ready, of), (PART, request().bytes));
    assert_eq!(seen(&progress), [ByteCount::ZERO; 3]);
    for registration in [Requirement::Off, Requirement::Preferred] {
        let error =
            in_parts(&context, registration, &progress).allocate_memory(&request()).unwrap_err();
        let CudaError::HostMemory { source } = &error else { panic!("{error}") };
        assert!(matches!(**source, StorageError::Cancelled { .. }), "{error}");
    }
    let usage = context.usage();
    assert_eq!(
        (usage.registered, usage.host),
        (ResourceCount::default(), ResourceCount::default())
    );
}
