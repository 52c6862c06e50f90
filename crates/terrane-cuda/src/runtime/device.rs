//! The properties of a device, read once from the driver.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute};
use terrane_core::{ByteCount, DeviceId};
use terrane_storage::{NodeId, NumaTopology, PciAddress};

use crate::driver::Driver;
use crate::driver::functions::Functions;
use crate::driver::version::DriverVersion;
use crate::error::{CudaError, check};

/// Checks whether CUDA is usable here, and lists the devices.
///
/// Never panics and never aborts. The only lasting effect is the loaded library. Failures are not
/// cached, so a later call can succeed.
///
/// ```
/// match terrane_cuda::probe() {
///     Ok(found) => println!("CUDA {}: {} devices", found.version, found.devices.len()),
///     Err(reason) => println!("no CUDA: {reason}"),
/// }
/// ```
///
/// # Errors
///
/// [`CudaError::LibraryMissing`], [`CudaError::DriverTooOld`] with the missing function,
/// [`CudaError::NoDevice`], [`CudaError::ContextLost`], [`CudaError::Forked`], or
/// [`CudaError::Driver`] with the driver's code.
pub fn probe() -> Result<Availability, CudaError> {
    let driver = Driver::load()?;
    let devices = driver.devices()?;
    Ok(Availability { version: driver.version()?, devices })
}

/// The result of [`probe`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Availability {
    /// The newest CUDA version that the driver supports.
    pub version: DriverVersion,
    /// All devices, by ordinal; at least one.
    pub devices: Vec<Device>,
}

/// The properties of a device, as plain data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Device {
    /// Its ordinal in the driver's numbering of this process.
    pub id: DeviceId,
    /// Its name: `"NVIDIA H200"`.
    pub name: String,
    /// Its PCI address; `None` if the driver reports no valid address.
    pub pci_address: Option<PciAddress>,
    /// Its total memory.
    pub memory: ByteCount,
    /// The major and the minor number of its compute capability: `(9, 0)`.
    pub compute_capability: (u32, u32),
    /// Its number of multiprocessors.
    pub multiprocessors: u32,
    /// The number of copies that it runs beside kernels: 1, or 2 and more for both directions at
    /// once.
    pub copy_engines: u32,
    /// Whether it supports stream-ordered memory pools.
    pub has_memory_pools: bool,
    /// Whether it accesses registered host memory at the host's own addresses.
    pub uses_host_addresses: bool,
}

impl Device {
    /// The NUMA node that the device is attached to, if the system reports it.
    #[must_use]
    pub fn numa_node(&self, topology: &NumaTopology) -> Option<NodeId> {
        topology.node_of_pci_device(self.pci_address?)
    }

    /// Reads one device of the driver.
    pub(crate) fn read(driver: Driver, id: DeviceId) -> Result<Self, CudaError> {
        use CUdevice_attribute::*;
        let functions = driver.functions();
        let device = handle(driver, id)?;
        let attribute = |which| attribute(functions, device, which);
        Ok(Self {
            id,
            name: text("cuDeviceGetName", |text, length| {
                // SAFETY: the buffer has that length.
                unsafe { (functions.cuDeviceGetName)(text, length, device) }
            })?,
            pci_address: text("cuDeviceGetPCIBusId", |text, length| {
                // SAFETY: the buffer has that length.
                unsafe { (functions.cuDeviceGetPCIBusId)(text, length, device) }
            })?
            .parse()
            .ok(),
            memory: total_memory(functions, device)?,
            compute_capability: (
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            copy_engines: attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
            has_memory_pools: attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED)? != 0,
            uses_host_addresses: attribute(
                CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
            )? != 0,
        })
    }
}

impl Driver {
    /// All devices, by ordinal.
    ///
    /// # Errors
    ///
    /// [`CudaError::NoDevice`], [`CudaError::Driver`], [`CudaError::ContextLost`].
    pub fn devices(self) -> Result<Vec<Device>, CudaError> {
        (0..self.device_count()?).map(|ordinal| self.device(DeviceId::new(ordinal))).collect()
    }

    /// Returns one device.
    ///
    /// # Errors
    ///
    /// [`CudaError::UnknownDevice`], and as for [`devices`](Self::devices).
    pub fn device(self, id: DeviceId) -> Result<Device, CudaError> {
        let count = self.device_count()?;
        if id.get() >= count {
            return Err(CudaError::UnknownDevice { device: id, count });
        }
        Device::read(self, id)
    }
}

/// The driver's handle of a device that exists.
pub(crate) fn handle(driver: Driver, id: DeviceId) -> Result<CUdevice, CudaError> {
    let mut device = 0;
    let ordinal = c_int::try_from(id.get()).unwrap_or(c_int::MAX);
    // SAFETY: the function writes one number, and checks the ordinal.
    unsafe { driver.functions().cuDeviceGet(&raw mut device, ordinal) }?;
    Ok(device)
}

fn attribute(
    functions: &Functions,
    device: CUdevice,
    which: CUdevice_attribute,
) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: the function writes one number, and checks the attribute and the device.
    unsafe { functions.cuDeviceGetAttribute(&raw mut value, which, device) }?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn total_memory(functions: &Functions, device: CUdevice) -> Result<ByteCount, CudaError> {
    let mut bytes = 0;
    // SAFETY: the function writes one number, and checks the device.
    unsafe { functions.cuDeviceTotalMem_v2(&raw mut bytes, device) }?;
    Ok(ByteCount::from_usize(bytes))
}

/// Returns a text that the driver writes into a buffer. Invalid UTF-8 is replaced.
fn text(
    operation: &'static str,
    write: impl FnOnce(*mut c_char, c_int) -> u32,
) -> Result<String, CudaError> {
    let mut buffer = [0_u8; 256];
    // The length passed is one byte short: the last byte stays zero.
    check(operation, write(buffer.as_mut_ptr().cast(), 255))?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
