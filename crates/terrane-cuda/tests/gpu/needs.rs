//! What a test needs, and how bytes of a device are reached.

use terrane_core::{BoxedCause, ByteCount, DeviceId, HostAddress, Location};
use terrane_cuda::{Context, DriverVersion, Stream};
use terrane_testkit::pattern::{InProcess, PieceAccess};

/// What a test needs.
#[derive(Clone, Copy)]
pub struct Needs {
    /// Bytes of the device that are free.
    pub device: ByteCount,
    /// Bytes of the host that are available.
    pub host: ByteCount,
}

/// A few MiB of either.
pub const LITTLE: Needs = Needs { device: ByteCount::mib(64), host: ByteCount::mib(64) };

/// The first device, or `None` after having said what is missing.
pub fn device(test: &str, needs: Needs) -> Option<Context> {
    match check(needs) {
        Ok(context) => Some(context),
        Err(reason) => {
            eprintln!("skipped: {test}: {reason}");
            None
        }
    }
}

/// As [`device`], but one that can run the copy kernels, by its driver and by itself.
pub fn device_with_kernels(test: &str, needs: Needs) -> Option<Context> {
    let context = device(test, needs)?;
    let newest = context.driver().version().unwrap();
    let (major, minor) = context.device().compute_capability;
    if newest < OLDEST_WITH_KERNELS || major < 8 {
        eprintln!(
            "skipped: {test}: a driver of CUDA {OLDEST_WITH_KERNELS} and compute capability 8.0 \
             needed, these are {newest} and {major}.{minor}"
        );
        return None;
    }
    Some(context)
}

/// The first driver that takes the PTX of the kernels.
const OLDEST_WITH_KERNELS: DriverVersion = DriverVersion { major: 12, minor: 0 };

/// As [`device_with_kernels`], and a second device, of which the needs are not asked.
pub fn two_devices(test: &str, needs: Needs) -> Option<[Context; 2]> {
    let context = device_with_kernels(test, needs)?;
    match Context::primary(DeviceId::new(1)) {
        Ok(peer) => Some([context, peer]),
        Err(error) => {
            eprintln!("skipped: {test}: two devices needed: {error}");
            None
        }
    }
}

/// As [`device`], but not one that is simulated: for what is measured, for what takes as much memory
/// as a device has, and for work that has to take its time.
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

fn check(needs: Needs) -> Result<Context, BoxedCause> {
    let context = Context::primary(DeviceId::new(0))?;
    let (free, _) = context.memory()?;
    if free < needs.device {
        return Err(format!("{} of device memory needed, {free} free", needs.device).into());
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo")?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib: u64 = line.ok_or("no MemAvailable")?.trim().trim_end_matches(" kB").parse()?;
    let available = ByteCount::product(&[("KiB", kib), ("bytes", 1024)])?;
    if available < needs.host {
        return Err(format!("{} of host memory needed, {available} available", needs.host).into());
    }
    Ok(context)
}

/// Reaches device memory by copies on a stream, and everything else as this process does.
pub struct OnDevice(pub Stream);

impl OnDevice {
    pub fn new(context: &Context) -> Self {
        Self(Stream::new(context).unwrap())
    }
}

impl PieceAccess for OnDevice {
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause> {
        if !matches!(at, Location::Device { .. }) {
            // SAFETY: the caller's promise.
            return unsafe { InProcess.read(at, bytes) };
        }
        let length = ByteCount::from_usize(bytes.len());
        let to = HostAddress::new(std::ptr::NonNull::from(bytes).cast::<u8>());
        // SAFETY: the caller's promise, and the buffer outlives the wait.
        unsafe { self.0.copy(at, Location::Host(to), length) }?;
        Ok(self.0.synchronize()?)
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        if !matches!(at, Location::Device { .. }) {
            // SAFETY: the caller's promise.
            return unsafe { InProcess.write(at, bytes) };
        }
        let from = HostAddress::new(std::ptr::NonNull::from(bytes).cast::<u8>());
        let length = ByteCount::from_usize(bytes.len());
        // SAFETY: the caller's promise, and the buffer outlives the wait.
        unsafe { self.0.copy(Location::Host(from), at, length) }?;
        Ok(self.0.synchronize()?)
    }
}
