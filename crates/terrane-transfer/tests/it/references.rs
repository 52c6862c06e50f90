//! Transfers equal the reference copies of vLLM, SGLang and LMCache.

use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::InProcess;
use terrane_testkit::references::{Reference, allocated_by, check, lmcache, sglang, vllm};
use terrane_transfer::TransferManager;
use terrane_transfer::engines::{HostEngine, HostEngineOptions};

/// Checks every reference between pinned memory and other host memory.
fn check_each(references: &[Reference]) {
    // Small chunks, so that threads share each transfer.
    let options = HostEngineOptions { chunk: ByteCount::new(256), ..HostEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(HostEngine::new(options).unwrap()) as _]);
    let (system, pinned) = (HeapAllocator::system(), HeapAllocator::pinned());
    let (here, there) = (allocated_by(&system), allocated_by(&pinned));
    for reference in references {
        check(std::slice::from_ref(reference), &manager, &InProcess, [&here, &there]);
    }
    // All of them at once.
    check(references, &manager, &InProcess, [&there, &here]);
}

#[test]
fn references_of_vllm_offloading_are_met() {
    let references = vllm::references(1);
    assert_eq!(references.len(), 168);
    check_each(&references);
}

#[test]
fn references_of_vllm_groups_are_met() {
    for seed in 0..8 {
        for stores in [true, false] {
            let groups = vllm::groups(seed, stores);
            assert_eq!(
                groups.iter().map(|each| each.blocks[0].len()).collect::<Vec<_>>(),
                [6, 0, 2]
            );
            check_each(&groups);
        }
    }
}

#[test]
fn references_of_sglang_pools_are_met() {
    let references = sglang::references(2);
    assert_eq!(references.len(), 128);
    check_each(&references);
}

#[test]
fn references_of_lmcache_formats_are_met() {
    let references = lmcache::references(3);
    assert_eq!(references.len(), 208);
    check_each(&references);
}

#[test]
fn references_of_lmcache_binary_objects_are_met() {
    check_each(&lmcache::binary(4));
}

/// A reference check must be able to fail.
#[test]
#[should_panic(expected = "1 bytes of the tensor differ")]
fn a_byte_that_differs_from_its_reference_is_found() {
    let mut references = lmcache::binary(5);
    references[0].expected[0][0] ^= 1;
    check_each(&references);
}
