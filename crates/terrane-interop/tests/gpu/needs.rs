//! What a test needs.

use terrane_core::{ByteCount, DeviceId};
use terrane_cuda::Context;

/// What any of these tests takes of the device.
const LITTLE: ByteCount = ByteCount::mib(64);

/// The first device, or `None` after having said what is missing.
pub fn device(test: &str) -> Option<Context> {
    let reason = match Context::primary(DeviceId::new(0)) {
        Ok(context) => {
            let (free, _) = context.memory().unwrap();
            if free >= LITTLE {
                return Some(context);
            }
            format!("{LITTLE} of device memory needed, {free} free")
        }
        Err(error) => error.to_string(),
    };
    eprintln!("skipped: {test}: {reason}");
    None
}

/// A second device, or `None` after having said that there is none.
pub fn second(test: &str) -> Option<Context> {
    match Context::primary(DeviceId::new(1)) {
        Ok(context) => Some(context),
        Err(error) => {
            eprintln!("skipped: {test}: a second device needed: {error}");
            None
        }
    }
}
