//! Address spaces of peers as NIXL's memory types and device numbers.

use terrane_core::{Location, RemoteSpace, Span};

use crate::bindings::memory_type::MemoryType;

/// A peer's space as NIXL's device number: a device's ordinal, a file's number, 0 for the host.
pub(crate) fn device_of(space: RemoteSpace) -> Option<(MemoryType, u64)> {
    Some(match space {
        RemoteSpace::Host => (MemoryType::Host, 0),
        RemoteSpace::Device(device) => (MemoryType::Device, device.get().into()),
        RemoteSpace::File(number) => (MemoryType::File, number),
        _ => return None,
    })
}

/// A local span's space as peers see it, with NIXL's number of the device or file.
pub(super) fn space_of(span: &Span, number: u64) -> Option<RemoteSpace> {
    Some(match span.location {
        Location::Host(_) => RemoteSpace::Host,
        Location::Device { device, .. } => RemoteSpace::Device(device),
        Location::File(_) => RemoteSpace::File(number),
        _ => return None,
    })
}
