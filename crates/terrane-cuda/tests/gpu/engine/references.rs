//! Transfers between the device and pinned memory equal the reference copies of vLLM, SGLang and
//! LMCache.

use terrane_core::{Alignment, Allocate, ByteCount, Memory, Region, RegionRequest};
use terrane_cuda::{
    Context, CopyPath, DeviceAllocator, DeviceEngineOptions, PinnedAllocator, PinnedOptions,
};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::references::{Reference, allocated_by, check, lmcache, sglang, vllm};

use super::fixture::{DEVICE, Fixture, PINNED};
use crate::needs::{Needs, device_with_kernels as device, is_simulated};

const ROOM: Needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };

/// Copies each reference from pinned memory to the device, the other way, and within the device.
fn check_each(context: &Context, references: &[Reference], path: Option<CopyPath>) {
    let fixture = match path {
        Some(path) => Fixture::in_small_parts(context, path, &[DEVICE, PINNED]),
        None => Fixture::new(context, DeviceEngineOptions::default(), &[DEVICE, PINNED]),
    };
    let (manager, access) = (fixture.manager(), fixture.access());
    let memory = DeviceAllocator::new(context);
    let pinned = PinnedAllocator::new(context, PinnedOptions::default()).unwrap();
    let on_device = |length: usize| {
        let bytes = ByteCount::from_usize(length);
        let request = RegionRequest::new(bytes).aligned_to(Alignment::PAGE);
        let region = Region::new(memory.allocate(&request).unwrap());
        assert_eq!(region.length(), bytes);
        region
    };
    let on_host = allocated_by(&pinned);
    // A few at a time, because all of them together need much memory.
    for some in references.chunks(8) {
        check(some, &manager, access, [&on_device, &on_host]);
        check(some, &manager, access, [&on_host, &on_device]);
        if path.is_none() {
            check(some, &manager, access, [&on_device, &on_device]);
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// By every path; on a simulated device only one of every `of_simulated` references.
fn by_every_path(test: &str, references: &[Reference], of_simulated: usize) {
    let Some(context) = device(test, ROOM) else { return };
    let step = if is_simulated(&context) { of_simulated } else { 1 };
    let some: Vec<Reference> = references.iter().step_by(step).cloned().collect();
    for path in [None, Some(CopyPath::Direct), Some(CopyPath::Staged), Some(CopyPath::Batched)] {
        check_each(&context, &some, path);
    }
}

#[test]
fn references_of_vllm_offloading_are_met_by_every_path() {
    let name = "references_of_vllm_offloading_are_met_by_every_path";
    by_every_path(name, &vllm::references(1), 5);
}

#[test]
fn references_of_vllm_groups_are_met_by_every_path() {
    let name = "references_of_vllm_groups_are_met_by_every_path";
    for stores in [true, false] {
        by_every_path(name, &vllm::groups(2, stores), 1);
    }
}

#[test]
fn references_of_sglang_pools_are_met_by_every_path() {
    let name = "references_of_sglang_pools_are_met_by_every_path";
    by_every_path(name, &sglang::references(3), 5);
}

#[test]
fn references_of_lmcache_formats_are_met_by_every_path() {
    let name = "references_of_lmcache_formats_are_met_by_every_path";
    let mut references = lmcache::references(4);
    references.extend(lmcache::binary(5));
    by_every_path(name, &references, 7);
}
