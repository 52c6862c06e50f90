//! The devices that tests need. No test needs the copy kernels, because the engine also copies
//! without them.

use terrane_core::{BoxedCause, DeviceId};
use terrane_cuda::Context;
use terrane_testkit::needs::{Needs, or_skipped};

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
