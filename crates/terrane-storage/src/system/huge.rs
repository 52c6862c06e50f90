//! The kernel's information about huge pages.

use std::fs;
use std::ops::Range;

use terrane_core::{Alignment, ByteCount, OsError, Reason};

use super::options::HugePageSize;

/// The setting of transparent huge pages.
const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// The reason why the kernel never assembles huge pages. `None` if it may.
pub(super) fn transparent_refusal() -> Option<Reason> {
    match fs::read_to_string(SWITCH) {
        Ok(text) if text.contains("[never]") => Some(Reason::Disabled { by: SWITCH }),
        Ok(_) => None,
        Err(_) => Some(Reason::Unsupported { by: "the kernel" }),
    }
}

/// The reason why a request for `needed` bytes in explicit huge pages of `size` failed.
pub(super) fn explicit_refusal(size: HugePageSize, needed: ByteCount, error: OsError) -> Reason {
    let kib = size.alignment().get() >> 10;
    let path = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB/free_hugepages");
    let free = fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    match free.and_then(|free| free.checked_mul(size.alignment().get())) {
        None => Reason::Unsupported { by: "the kernel (no huge pages of this size)" },
        Some(free) if free < needed.get() => {
            Reason::Exhausted { needed, available: ByteCount::new(free) }
        }
        Some(_) => Reason::Os(error),
    }
}

/// The number of bytes in `range` that are in huge pages, transparent or explicit, from
/// `/proc/self/smaps`.
///
/// The kernel reports a count for each mapping, and may have merged a neighbour into this one. The
/// huge bytes are then attributed to the part outside the range first. The result is therefore
/// never too high.
pub(super) fn huge_bytes(range: Range<u64>) -> Result<ByteCount, OsError> {
    let text =
        fs::read_to_string("/proc/self/smaps").map_err(|error| OsError::from_io("read", &error))?;
    Ok(ByteCount::new(count_huge(&text, &range)))
}

fn count_huge(smaps: &str, range: &Range<u64>) -> u64 {
    let mut total = 0;
    let (mut inside, mut outside) = (0, 0);
    for line in smaps.lines() {
        if let Some(mapping) = mapping_of(line) {
            let begin = mapping.start.max(range.start);
            inside = mapping.end.min(range.end).saturating_sub(begin);
            outside = (mapping.end - mapping.start).saturating_sub(inside);
        } else if inside > 0
            && let Some(huge) =
                value_of(line, "AnonHugePages:").or_else(|| value_of(line, "Private_Hugetlb:"))
        {
            total += huge.saturating_sub(outside).min(inside);
        }
    }
    total.min(range.end - range.start)
}

/// The addresses of a mapping, from the first line of its entry: `7f00-7f10 rw-p …`.
fn mapping_of(line: &str) -> Option<Range<u64>> {
    let (begin, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    let (begin, end) = (hex(begin)?, hex(end)?);
    (begin <= end).then_some(begin..end)
}

/// The number of bytes on a line such as `key   12 kB`.
fn value_of(line: &str, key: &str) -> Option<u64> {
    let rest = line.strip_prefix(key)?.trim().strip_suffix("kB")?;
    rest.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The largest part of `length` in whole huge pages. It excludes the bytes after the last whole
/// page.
pub(super) fn largest_huge_part(length: ByteCount) -> ByteCount {
    ByteCount::new(length.get() & !(Alignment::HUGE_PAGE.get() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
10000000-10800000 rw-p 00000000 00:00 0
Size:               8192 kB
AnonHugePages:      6144 kB
Private_Hugetlb:       0 kB
VmFlags: rd wr mr mw me ac sd
20000000-20400000 rw-p 00000000 00:0f 7 /anon_hugepage (deleted)
AnonHugePages:         0 kB
Private_Hugetlb:    4096 kB
";

    #[test]
    fn bytes_are_counted_by_mapping() {
        assert_eq!(count_huge(SMAPS, &(0x1000_0000..0x1080_0000)), 6 << 20);
        assert_eq!(count_huge(SMAPS, &(0x2000_0000..0x2040_0000)), 4 << 20);
        assert_eq!(count_huge(SMAPS, &(0x3000_0000..0x3040_0000)), 0);
    }

    #[test]
    fn a_merged_neighbour_is_not_counted_for_us() {
        // 6 of the 8 MiB are huge. The 4 MiB outside the range could be entirely huge.
        assert_eq!(count_huge(SMAPS, &(0x1000_0000..0x1040_0000)), 2 << 20);
    }
}
