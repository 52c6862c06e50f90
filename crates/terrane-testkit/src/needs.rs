//! The machine that a test needs.

use terrane_core::{BoxedCause, ByteCount};

/// The free memory, and the capabilities, that a test needs of a device and of the host.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    device: ByteCount,
    host: ByteCount,
    pools: bool,
}

/// A device, and none of its memory.
pub const NO_MEMORY: Needs = Needs::of_device(ByteCount::ZERO);

/// A few small arrays: the minimum that a driver allocates.
pub const LITTLE: Needs = Needs::of_device(ByteCount::mib(4)).and_host(ByteCount::mib(4));

impl Needs {
    /// This many free bytes of each device, and nothing else.
    pub const fn of_device(device: ByteCount) -> Self {
        Self { device, host: ByteCount::ZERO, pools: false }
    }

    /// Adds this many available bytes of the host.
    pub const fn and_host(self, host: ByteCount) -> Self {
        Self { host, ..self }
    }

    /// Adds stream-ordered memory pools.
    pub const fn and_pools(self) -> Self {
        Self { pools: true, ..self }
    }

    /// Checks a device that has `free` bytes, and the host.
    ///
    /// # Errors
    ///
    /// The missing amount or capability.
    pub fn check(self, number: u32, free: ByteCount, has_pools: bool) -> Result<(), BoxedCause> {
        of_device(number, free, self.device)?;
        if self.pools && !has_pools {
            return Err(format!("a driver with pools of device {number}'s memory needed").into());
        }
        of_host(self.host)
    }
}

/// Returns the value. If it is missing, prints on standard error that the test is skipped, with the
/// reason.
#[expect(clippy::print_stderr, reason = "skipped tests are reported on standard error")]
pub fn or_skipped<T>(test: &str, found: Result<T, BoxedCause>) -> Option<T> {
    found.inspect_err(|reason| eprintln!("skipped: {test}: {reason}")).ok()
}

/// Fails with this reason under AddressSanitizer, as `cargo xtask asan` runs the tests.
///
/// # Errors
///
/// The reason.
#[expect(clippy::disallowed_methods, reason = "the sanitizer is configured by the environment")]
pub fn no_sanitizer(reason: &str) -> Result<(), BoxedCause> {
    match std::env::var_os("ASAN_OPTIONS") {
        Some(_) => Err(reason.into()),
        None => Ok(()),
    }
}

/// Checks that this much of a device's memory is free.
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

/// Checks that this much of the host's memory is available.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmet_needs_are_named() {
        let (some, all) = (ByteCount::mib(8), ByteCount::new(u64::MAX));
        assert!(LITTLE.check(0, some, false).is_ok());
        for (needs, missing) in [
            (Needs::of_device(all), "of device 1's memory needed"),
            (NO_MEMORY.and_host(all), "of host memory needed"),
            (NO_MEMORY.and_pools(), "pools of device 1's memory needed"),
        ] {
            let reason = needs.check(1, some, false).unwrap_err().to_string();
            assert!(reason.contains(missing), "{reason}");
        }
    }
}
