//! The devices of tensors.

use std::fmt;

use terrane_core::{DeviceId, StorageKind};

use super::ffi::DLDevice;

const CPU: u32 = 1;
const CUDA: u32 = 2;
const CUDA_HOST: u32 = 3;

/// The memory of a tensor: the DLPack devices that match a kind of memory in Terrane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorDevice {
    /// Pageable memory of the host (`kDLCPU`).
    Host,
    /// Host memory that is page-locked for CUDA devices (`kDLCUDAHost`).
    PinnedHost,
    /// Memory of a CUDA device (`kDLCUDA`).
    Cuda(DeviceId),
}

impl TensorDevice {
    /// The device of memory of this kind, if DLPack has one.
    #[must_use]
    pub const fn of(kind: StorageKind) -> Option<Self> {
        match kind {
            StorageKind::System => Some(Self::Host),
            StorageKind::Pinned => Some(Self::PinnedHost),
            StorageKind::Device(id) => Some(Self::Cuda(id)),
            _ => None,
        }
    }

    /// The kind of memory.
    #[must_use]
    pub const fn kind(self) -> StorageKind {
        match self {
            Self::Host => StorageKind::System,
            Self::PinnedHost => StorageKind::Pinned,
            Self::Cuda(id) => StorageKind::Device(id),
        }
    }

    /// The type and the number, as `__dlpack_device__` returns them.
    #[must_use]
    pub fn to_pair(self) -> (u32, i32) {
        match self {
            Self::Host => (CPU, 0),
            Self::PinnedHost => (CUDA_HOST, 0),
            // No machine has more devices than an `i32` can count.
            Self::Cuda(id) => (CUDA, i32::try_from(id.get()).unwrap_or(i32::MAX)),
        }
    }

    pub(crate) fn to_raw(self) -> DLDevice {
        let (device_type, device_id) = self.to_pair();
        DLDevice { device_type, device_id }
    }

    /// The device, if its type is known and its number is valid for the type.
    pub(crate) fn from_raw(raw: DLDevice) -> Option<Self> {
        let number = u32::try_from(raw.device_id).ok()?;
        match raw.device_type {
            CPU if number == 0 => Some(Self::Host),
            // Some libraries pass the device that was current when the memory was page-locked.
            CUDA_HOST => Some(Self::PinnedHost),
            CUDA => Some(Self::Cuda(DeviceId::new(number))),
            _ => None,
        }
    }
}

impl fmt::Display for TensorDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.pad("the host"),
            Self::PinnedHost => f.pad("the host (pinned)"),
            Self::Cuda(id) => write!(f, "CUDA device {id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_survive_the_way_there_and_back() {
        for device in
            [TensorDevice::Host, TensorDevice::PinnedHost, TensorDevice::Cuda(DeviceId::new(7))]
        {
            assert_eq!(TensorDevice::from_raw(device.to_raw()), Some(device));
            assert_eq!(TensorDevice::of(device.kind()), Some(device));
        }
        assert_eq!(TensorDevice::of(StorageKind::Disk), None);
    }

    #[test]
    fn unknown_devices_and_numbers_are_none() {
        let raw = |device_type, device_id| DLDevice { device_type, device_id };
        for (device_type, device_id) in
            [(0, 0), (1, 1), (1, -1), (2, -1), (3, i32::MIN), (4, 0), (10, 0), (13, 0), (99, 0)]
        {
            assert_eq!(TensorDevice::from_raw(raw(device_type, device_id)), None);
        }
    }
}
