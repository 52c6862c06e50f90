//! Counts open descriptors and mappings of this process before and after an action.

use std::fs;

use terrane_core::ByteCount;
use terrane_core::convert::to_u64;

/// The variables of a [child process](crate::process::in_child_with) that counts memory.
/// AddressSanitizer keeps freed memory to detect late uses, which would count as a leak there.
pub const FREES_AT_ONCE: [(&str, &str); 1] =
    [("ASAN_OPTIONS", "detect_leaks=0:quarantine_size_mb=0")];

/// The kernel resources of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The target of each open descriptor.
    pub descriptors: Vec<String>,
    /// All mapped bytes, resident or not.
    pub mapped: ByteCount,
}

impl Held {
    /// Counts the resources.
    #[must_use]
    pub fn now() -> Self {
        Self { descriptors: descriptors(), mapped: mapped() }
    }
}

/// Panics if `action`, repeated this many times, leaks a descriptor or `bytes` of mappings each
/// time. Use it only for tests [alone in their process](crate::process::in_child), because
/// resources of other tests would count. The number of repetitions distinguishes a leak from a few
/// temporary threads.
///
/// One run comes first, so that resources which `action` keeps deliberately do not count.
#[track_caller]
pub fn assert_no_growth(times: u32, bytes: ByteCount, mut action: impl FnMut()) {
    action();
    let before = Held::now();
    for _ in 0..times {
        action();
    }
    let after = Held::now();
    let times = usize::try_from(times).expect("64 bits");
    let more = after.descriptors.len().saturating_sub(before.descriptors.len());
    assert!(
        more < times,
        "{more} descriptors were leaked in {times} rounds; open now: {:#?}",
        after.descriptors
    );
    let leak = bytes.checked_mul("rounds", to_u64(times)).expect("it fits");
    let grown = after.mapped.checked_sub(before.mapped).unwrap_or(ByteCount::ZERO);
    assert!(
        bytes.is_zero() || grown < leak,
        "{grown} of mappings were leaked in {times} rounds of {bytes}"
    );
}

/// Panics if `action` leaves a descriptor open. Use it only for tests whose process does nothing
/// else at the same time.
#[track_caller]
pub fn assert_descriptors_unchanged<T>(action: impl FnOnce() -> T) -> T {
    let before = descriptors();
    let result = action();
    assert_eq!(descriptors(), before, "descriptors after (left) and before (right)");
    result
}

fn descriptors() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/fd").expect("Linux lists open descriptors");
    let links = entries.filter_map(|entry| {
        // One is the directory that is being read, and other threads may close descriptors
        // concurrently.
        let link = fs::read_link(entry.ok()?.path()).ok()?;
        let link = link.to_string_lossy().into_owned();
        (!link.starts_with("/proc/")).then_some(link)
    });
    let mut links: Vec<_> = links.collect();
    links.sort_unstable();
    links
}

fn mapped() -> ByteCount {
    let maps = fs::read_to_string("/proc/self/maps").expect("Linux lists mappings");
    let length = |line: &str| {
        let (begin, end) = line.split_whitespace().next()?.split_once('-')?;
        let address = |text| u64::from_str_radix(text, 16).ok();
        Some(ByteCount::new(address(end)?.checked_sub(address(begin)?)?))
    };
    maps.lines().filter_map(length).collect::<Result<_, _>>().expect("an address space's size")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::in_child;

    #[test]
    fn an_open_descriptor_is_detected_and_a_closed_one_is_not() {
        const TEST: &str = "leaks::tests::an_open_descriptor_is_detected_and_a_closed_one_is_not";
        // In a separate process, because another test that closes descriptors would hide a leak.
        in_child(TEST, || {
            let open = || fs::File::open("/dev/null").expect("/dev/null");
            assert_no_growth(16, ByteCount::ZERO, || drop(open()));
            let mut kept = Vec::new();
            let leak = std::panic::AssertUnwindSafe(|| {
                assert_no_growth(16, ByteCount::ZERO, || kept.push(open()));
            });
            assert!(std::panic::catch_unwind(leak).is_err());
        });
    }
}
