//! System memory of a process at its limit on mappings.

use std::ptr::null_mut;

use terrane_core::{ByteCount, Memory, RegionRequest};
use terrane_storage::{FirstTouch, HugePages, SystemAllocator, SystemMemory, SystemOptions};
use terrane_testkit::needs::{no_sanitizer, or_skipped};
use terrane_testkit::process::in_child;

use crate::support::skipped;

const PAGE: usize = 4096;
const REGIONS: usize = 16_384;

/// The lines of `/proc/self/maps`.
fn mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// Bytes in memory: `Rss` of `/proc/self/statm`.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
}

/// Creates mappings until the limit allows only `left` more.
fn use_up_mappings(limit: usize, left: usize) {
    let count = limit - left - mappings();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: the kernel chooses a range where nothing is mapped.
    let base = unsafe { libc::mmap(null_mut(), count * PAGE, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    for page in (1..count).step_by(2) {
        // A page with other permissions than its neighbours is a separate mapping. SAFETY: the page
        // is in the mapping above.
        let result =
            unsafe { libc::mprotect(base.wrapping_byte_add(page * PAGE), PAGE, libc::PROT_READ) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }
}

fn touched_region(allocator: &SystemAllocator) -> SystemMemory {
    let memory = allocator.allocate_memory(&RegionRequest::new(ByteCount::kib(4))).unwrap();
    // SAFETY: only this test uses the memory, which has one page.
    unsafe { memory.location().as_host().unwrap().as_ptr().write_bytes(1, PAGE) };
    memory
}

#[test]
fn memory_is_freed_if_no_mapping_can_be_split() {
    let test = "system_limits::memory_is_freed_if_no_mapping_can_be_split";
    in_child(test, || {
        let needs = no_sanitizer("AddressSanitizer itself needs more mappings");
        if or_skipped(test, needs).is_none() {
            return;
        }
        let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        if limit > 1 << 20 {
            return skipped(test, format!("vm.max_map_count is {limit}"));
        }
        let options = SystemOptions {
            huge_pages: HugePages::None,
            first_touch: FirstTouch::None,
            ..SystemOptions::default()
        };
        let allocator = SystemAllocator::new(options);
        let before = mappings();
        let regions: Vec<SystemMemory> = (0..REGIONS).map(|_| touched_region(&allocator)).collect();
        use_up_mappings(limit, REGIONS / 8);
        let (full, held) = (resident(), mappings());

        // Every other region: the kernel cannot split mappings for most of them, and frees their
        // pages.
        let (even, odd): (Vec<_>, Vec<_>) =
            regions.into_iter().enumerate().partition(|(index, _)| index % 2 == 0);
        drop(odd);
        let freed = full.saturating_sub(resident());
        assert!(freed >= REGIONS * PAGE * 3 / 8, "{freed} bytes were freed");
        let more = mappings() - held;
        assert!(more < REGIONS / 4, "{more} mappings more: the limit was not met");

        // The other half: no address stays mapped.
        drop(even);
        let freed = full.saturating_sub(resident());
        assert!(freed >= REGIONS * PAGE * 7 / 8, "{freed} bytes were freed");
        let of_regions = mappings().saturating_sub(held);
        assert!(of_regions <= 8, "{of_regions} mappings stay, of {before} before");

        // Allocation works as before.
        drop(touched_region(&allocator));
    });
}
