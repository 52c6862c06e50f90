//! The devices that tests need. No test needs the copy kernels, because the engine also copies
//! without them.

use terrane_core::{BoxedCause, ByteCount, DeviceId};
use terrane_cuda::Context;
use terrane_testkit::needs::{NO_MEMORY, Needs, or_skipped};

/// The first device. If a need is not met, prints a skip and returns `None`.
pub fn device(test: &str, needs: Needs) -> Option<Context> {
    or_skipped(test, check(0, needs))
}

/// Like [`device`], for the first two devices.
pub fn two_devices(test: &str, needs: Needs) -> Option<[Context; 2]> {
    or_skipped(test, check(0, needs).and_then(|first| Ok([first, check(1, needs)?])))
}

fn check(number: u32, needs: Needs) -> Result<Context, BoxedCause> {
    let context = Context::primary(DeviceId::new(number))
        .map_err(|error| format!("device {number} needed: {error}"))?;
    let (free, _) = context.memory()?;
    needs.check(number, free, context.device().has_memory_pools)?;
    Ok(context)
}

#[test]
fn unmet_needs_are_named() {
    let Some(_context) = device("unmet_needs_are_named", NO_MEMORY) else { return };
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
