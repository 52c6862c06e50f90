//! The needs of a test, and access to the bytes of a device.

use terrane_core::{
    Allocate, BoxedCause, ByteCount, DeviceId, HostAddress, Location, RegionRequest,
};
use terrane_cuda::{Context, DeviceAllocator, DriverVersion, Stream};
use terrane_testkit::needs as machine;
use terrane_testkit::pattern::{InProcess, PieceAccess};

/// The needs of a test.
#[derive(Clone, Copy)]
pub struct Needs {
    /// Free bytes of the device; with two devices, of each.
    pub device: ByteCount,
    /// Available bytes of the host.
    pub host: ByteCount,
}

/// A few MiB of each.
pub const LITTLE: Needs = Needs { device: ByteCount::mib(64), host: ByteCount::mib(64) };

/// Returns the first device. If a need is not met, prints the skip and returns `None`.
pub fn device(test: &str, needs: Needs) -> Option<Context> {
    machine::or_skipped(test, check(0, needs))
}

/// Like [`device`], for a device and a driver that can run the copy kernels.
pub fn device_with_kernels(test: &str, needs: Needs) -> Option<Context> {
    machine::or_skipped(test, check_with_kernels(needs))
}

/// Like [`device_with_kernels`], with a second device that meets the same needs.
pub fn two_devices(test: &str, needs: Needs) -> Option<[Context; 2]> {
    machine::or_skipped(test, check_two(needs))
}

/// Like [`device`], without simulated devices: for measurements, for tests that allocate all
/// memory, and for work that must take time.
pub fn real_device(test: &str, needs: Needs) -> Option<Context> {
    let context = device(test, needs)?;
    if is_simulated(&context) {
        eprintln!("skipped: {test}: a real device needed, this one is simulated");
        return None;
    }
    Some(context)
}

/// Whether the device is one of `terrane-simulated-cuda`.
pub fn is_simulated(context: &Context) -> bool {
    context.device().name == "Terrane Simulated Device"
}

/// The first driver that accepts the PTX of the kernels.
const OLDEST_WITH_KERNELS: DriverVersion = DriverVersion { major: 12, minor: 0 };

fn check_two(needs: Needs) -> Result<[Context; 2], BoxedCause> {
    Ok([check_with_kernels(needs)?, check(1, needs)?])
}

fn check_with_kernels(needs: Needs) -> Result<Context, BoxedCause> {
    let context = check(0, needs)?;
    let newest = context.driver().version()?;
    let (major, minor) = context.device().compute_capability;
    if newest < OLDEST_WITH_KERNELS || major < 8 {
        let reason = format!(
            "a driver of CUDA {OLDEST_WITH_KERNELS} and compute capability 8.0 needed, these are \
             {newest} and {major}.{minor}"
        );
        return Err(reason.into());
    }
    Ok(context)
}

/// Returns the device, or the unmet need.
fn check(number: u32, needs: Needs) -> Result<Context, BoxedCause> {
    let context = Context::primary(DeviceId::new(number))
        .map_err(|error| format!("device {number} needed: {error}"))?;
    let (free, _) = context.memory()?;
    machine::of_device(number, free, needs.device)?;
    machine::of_host(needs.host)?;
    Ok(context)
}

/// Accesses device memory by copies on a stream, and all other memory directly.
pub struct OnDevice(pub Stream);

impl OnDevice {
    pub fn new(context: &Context) -> Self {
        Self(Stream::new(context).unwrap())
    }
}

impl PieceAccess for OnDevice {
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause> {
        if !matches!(at, Location::Device { .. }) {
            // SAFETY: the caller guarantees it.
            return unsafe { InProcess.read(at, bytes) };
        }
        let length = ByteCount::from_usize(bytes.len());
        let to = HostAddress::new(std::ptr::NonNull::from(bytes).cast::<u8>());
        // SAFETY: the caller guarantees the span, and the buffer outlives the wait.
        unsafe { self.0.copy(at, Location::Host(to), length) }?;
        Ok(self.0.synchronize()?)
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        if !matches!(at, Location::Device { .. }) {
            // SAFETY: the caller guarantees it.
            return unsafe { InProcess.write(at, bytes) };
        }
        let from = HostAddress::new(std::ptr::NonNull::from(bytes).cast::<u8>());
        let length = ByteCount::from_usize(bytes.len());
        // SAFETY: the caller guarantees the span, and the buffer outlives the wait.
        unsafe { self.0.copy(Location::Host(from), at, length) }?;
        Ok(self.0.synchronize()?)
    }
}

#[test]
fn unmet_needs_are_named() {
    let nothing = Needs { device: ByteCount::ZERO, host: ByteCount::ZERO };
    let Some(_context) = device("unmet_needs_are_named", nothing) else { return };
    let all = ByteCount::new(u64::MAX);
    for (number, needs, missing) in [
        (0, Needs { device: all, ..nothing }, "of device 0's memory needed"),
        (0, Needs { host: all, ..nothing }, "of host memory needed"),
        (1000, nothing, "device 1000 needed"),
    ] {
        let reason = check(number, needs).unwrap_err().to_string();
        assert!(reason.contains(missing), "{reason}");
    }
}

/// The free memory of the second device counts, not that of the first.
#[test]
fn a_second_device_that_is_full_is_named() {
    let name = "a_second_device_that_is_full_is_named";
    let Some([context, peer]) = two_devices(name, LITTLE) else { return };
    if !is_simulated(&peer) {
        return eprintln!(
            "skipped: {name}: a real device is not filled, because others may use it"
        );
    }
    let (free, _) = peer.memory().unwrap();
    let most = free.checked_sub(ByteCount::mib(32)).unwrap();
    let filled = DeviceAllocator::new(&peer).allocate(&RegionRequest::new(most)).unwrap();
    check_with_kernels(LITTLE).expect("the first one has room");
    let reason = check_two(LITTLE).unwrap_err().to_string();
    assert!(reason.contains("of device 1's memory needed"), "{reason}");
    drop((filled, context));
    check_two(LITTLE).expect("both have room again");
}
