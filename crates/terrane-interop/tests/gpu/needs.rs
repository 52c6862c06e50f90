//! What a test needs. None needs the copy kernels: the engine copies without them where a driver
//! refuses them.

use terrane_core::{BoxedCause, ByteCount, DeviceId};
use terrane_cuda::Context;
use terrane_testkit::needs as machine;

/// What a test needs.
#[derive(Clone, Copy)]
pub struct Needs {
    /// Bytes of the device, of each where there are two, that are free.
    device: ByteCount,
    /// Bytes of the host that are available.
    host: ByteCount,
}

/// A device, and none of its memory.
pub const NO_MEMORY: Needs = Needs::of_device(ByteCount::ZERO);

/// A few arrays of some bytes, in what the driver takes at least.
pub const LITTLE: Needs = Needs::of_device(ByteCount::mib(4)).and_host(ByteCount::mib(4));

impl Needs {
    /// So much of the device, and nothing else.
    pub const fn of_device(device: ByteCount) -> Self {
        Self { device, host: ByteCount::ZERO }
    }

    /// And so much of the host.
    pub const fn and_host(self, host: ByteCount) -> Self {
        Self { host, ..self }
    }
}

/// The first device, or `None` after having said what is missing.
pub fn device(test: &str, needs: Needs) -> Option<Context> {
    machine::or_skipped(test, check(0, needs))
}

/// The first two devices, or `None` after having said what is missing of which.
pub fn two_devices(test: &str, needs: Needs) -> Option<[Context; 2]> {
    machine::or_skipped(test, check(0, needs).and_then(|first| Ok([first, check(1, needs)?])))
}

fn check(number: u32, needs: Needs) -> Result<Context, BoxedCause> {
    let context = Context::primary(DeviceId::new(number))
        .map_err(|error| format!("device {number} needed: {error}"))?;
    let (free, _) = context.memory()?;
    machine::of_device(number, free, needs.device)?;
    machine::of_host(needs.host)?;
    Ok(context)
}

#[test]
fn what_is_missing_is_named() {
    let Some(_context) = device("what_is_missing_is_named", NO_MEMORY) else { return };
    let all = ByteCount::new(u64::MAX);
    for (number, needs, missing) in [
        (0, Needs::of_device(all), "of device 0's memory needed"),
        (0, NO_MEMORY.and_host(all), "of host memory needed"),
        (1000, NO_MEMORY, "device 1000 needed"),
    ] {
        let reason = check(number, needs).unwrap_err().to_string();
        assert!(reason.contains(missing), "{reason}");
    }
    if let Ok(second) = Context::primary(DeviceId::new(1)) {
        let reason = check(1, Needs::of_device(all)).unwrap_err().to_string();
        assert!(reason.contains("of device 1's memory needed"), "{reason}: {second:?}");
    }
}
