//! Version 1 of a region's description. What is here never changes: a change is version 2.

use serde::{Deserialize, Serialize};
use terrane_core::{ByteCount, DeviceId, RemoteSpace};

use crate::frame::Opened;
use crate::input::{Input, count, put, put_names, unknown, unused};
use crate::{Limited, Part, RegionDescriptor, WireError, WireLimits};

/// A region by itself.
#[derive(Serialize, Deserialize)]
struct LoneRegion {
    /// 0 host, 1 device, 2 file.
    space: u8,
    /// The device or the file, or 0.
    number: u64,
    address: u64,
    length: u64,
    /// The number of names that follow.
    backends: u32,
}

pub(crate) fn write_region(
    region: &RegionDescriptor,
    frame: Vec<u8>,
) -> Result<Vec<u8>, WireError> {
    let (space, number) = match region.space() {
        RemoteSpace::Host => (0, 0),
        RemoteSpace::Device(device) => (1, device.get().into()),
        RemoteSpace::File(number) => (2, number),
        space => return Err(WireError::UnknownSpace { space }),
    };
    let lone = LoneRegion {
        space,
        number,
        address: region.address(),
        length: region.length().get(),
        backends: count(Limited::Backends, region.backends().len())?,
    };
    let frame = put(Part::Region(0), &lone, frame)?;
    put_names(Part::Backends(0), region.backends(), frame)
}

pub(crate) fn read_region(
    opened: &Opened<'_>,
    limits: &WireLimits,
) -> Result<RegionDescriptor, WireError> {
    let mut input = Input::new(opened);
    let lone: LoneRegion = input.take(Part::Region(0))?;
    let space = match lone.space {
        0 => unused("number of a host space", lone.number).map(|()| RemoteSpace::Host)?,
        1 => match u32::try_from(lone.number) {
            Ok(device) => RemoteSpace::Device(DeviceId::new(device)),
            Err(_) => return Err(WireError::NoSuchDevice { device: lone.number }),
        },
        2 => RemoteSpace::File(lone.number),
        tag => return Err(unknown("space", tag, &[0, 1, 2])),
    };
    let backends = input.take_set(Part::Backends(0), lone.backends, limits)?;
    input.end()?;
    let length = ByteCount::new(lone.length);
    Ok(RegionDescriptor::with_set(space, lone.address, length, backends))
}
