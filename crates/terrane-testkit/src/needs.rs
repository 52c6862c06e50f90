//! The machine that a test needs.

use terrane_core::{BoxedCause, ByteCount};

/// The found value. If it is missing, prints on standard error that the test is skipped, with the
/// reason.
#[expect(clippy::print_stderr, reason = "skipped tests are reported on standard error")]
pub fn or_skipped<T>(test: &str, found: Result<T, BoxedCause>) -> Option<T> {
    found.inspect_err(|reason| eprintln!("skipped: {test}: {reason}")).ok()
}

/// Checks that so much of a device's memory is free.
///
/// # Errors
///
/// The missing amount.
pub fn of_device(number: u32, free: ByteCount, needed: ByteCount) -> Result<(), BoxedCause> {
    if free < needed {
        return Err(format!("{needed} of device {number}'s memory needed, {free} free").into());
    }
    Ok(())
}

/// Checks that so much of the host's memory is available.
///
/// # Errors
///
/// The missing amount, or that `/proc/meminfo` does not state it.
pub fn of_host(needed: ByteCount) -> Result<(), BoxedCause> {
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line.ok_or("no MemAvailable")?.trim().trim_end_matches(" kB").parse()?;
    let available = ByteCount::product(&[("KiB", kib), ("bytes", 1024)])?;
    if available < needed {
        return Err(format!("{needed} of host memory needed, {available} available").into());
    }
    Ok(())
}
