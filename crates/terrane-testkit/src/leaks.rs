//! Open descriptors and mappings of this process, counted before and after.

use std::fs;

use terrane_core::ByteCount;

/// What this process holds of the kernel, just now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// What each open descriptor leads to.
    pub descriptors: Vec<String>,
    /// All bytes that are mapped, whether they are in memory or not.
    pub mapped: ByteCount,
}

impl Held {
    /// Counts.
    #[must_use]
    pub fn now() -> Self {
        Self { descriptors: descriptors(), mapped: mapped() }
    }
}

/// Panics if `action`, done so many times, left a descriptor or `bytes` of mappings behind each
/// time. Only for tests [alone in their process](crate::process::in_child), as what others open
/// meanwhile would count; what few threads of the action come and go is told from a leak by the
/// number.
///
/// It is done once beforehand, so that what is made once and kept does not count.
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
        "{more} descriptors were left behind in {times} rounds; open now: {:#?}",
        after.descriptors
    );
    let leak = bytes.checked_mul("rounds", ByteCount::from_usize(times).get()).expect("it fits");
    let grown = after.mapped.checked_sub(before.mapped).unwrap_or(ByteCount::ZERO);
    assert!(
        bytes.is_zero() || grown < leak,
        "{grown} of mappings were left behind in {times} rounds of {bytes}"
    );
}

/// Panics if `action` leaves any descriptor behind. Only for tests whose process does nothing
/// else meanwhile.
#[track_caller]
pub fn assert_descriptors_unchanged<T>(action: impl FnOnce() -> T) -> T {
    let before = descriptors();
    let result = action();
    assert_eq!(descriptors(), before, "descriptors after (left) and before (right)");
    result
}

fn descriptors() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/fd").expect("Linux says what is open");
    let links = entries.filter_map(|entry| {
        // One is the directory that is being read, and others may close meanwhile.
        let link = fs::read_link(entry.ok()?.path()).ok()?;
        let link = link.to_string_lossy().into_owned();
        (!link.starts_with("/proc/")).then_some(link)
    });
    let mut links: Vec<_> = links.collect();
    links.sort_unstable();
    links
}

fn mapped() -> ByteCount {
    let maps = fs::read_to_string("/proc/self/maps").expect("Linux says what is mapped");
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
    fn a_descriptor_that_stays_open_is_noticed_and_one_that_closes_is_not() {
        const TEST: &str =
            "leaks::tests::a_descriptor_that_stays_open_is_noticed_and_one_that_closes_is_not";
        // Alone in its process: what another test closes meanwhile would hide a leak.
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
