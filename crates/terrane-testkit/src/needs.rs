//! What a test needs of the machine that it runs on.

use terrane_core::{BoxedCause, ByteCount};

/// What a test needs, if it is there; otherwise says on standard error that the test is skipped, and
/// why.
#[expect(clippy::print_stderr, reason = "what could not run is said on standard error")]
pub fn or_skipped<T>(test: &str, found: Result<T, BoxedCause>) -> Option<T> {
    found.inspect_err(|reason| eprintln!("skipped: {test}: {reason}")).ok()
}

/// Checks that so much of a device's memory is free.
///
/// # Errors
///
/// What is missing.
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
/// What is missing, or that `/proc/meminfo` does not say.
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
