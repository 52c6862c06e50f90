//! Version 1 of a region's description. This form never changes; any change is version 2.

use serde::{Deserialize, Serialize};
use terrane_core::{ByteCount, DeviceId, RemoteSpace};

use super::descriptor::RegionDescriptor;
use crate::error::{Part, WireError};
use crate::frame::FramePayload;
use crate::frame::input::{Input, count, put, put_names, unknown, unused};
use crate::limits::{Limited, WireLimits};

/// A region without a layout.
#[derive(Serialize, Deserialize)]
struct EncodedRegion {
    /// 0 host, 1 device, 2 file.
    space: u8,
    /// The number of the device or file, or 0.
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
    let encoded = EncodedRegion {
        space,
        number,
        address: region.address(),
        length: region.length().get(),
        backends: count(Limited::Backends, region.backends().len())?,
    };
    let frame = put(Part::Region(0), &encoded, frame)?;
    put_names(Part::Backends(0), region.backends(), frame)
}

pub(crate) fn read_region(
    payload: &FramePayload<'_>,
    limits: &WireLimits,
) -> Result<RegionDescriptor, WireError> {
    let mut input = Input::new(payload);
    let encoded: EncodedRegion = input.take(Part::Region(0))?;
    let space = match encoded.space {
        0 => unused("number of a host space", encoded.number).map(|()| RemoteSpace::Host)?,
        1 => match u32::try_from(encoded.number) {
            Ok(device) => RemoteSpace::Device(DeviceId::new(device)),
            Err(_) => return Err(WireError::NoSuchDevice { device: encoded.number }),
        },
        2 => RemoteSpace::File(encoded.number),
        tag => return Err(unknown("space", tag, &[0, 1, 2])),
    };
    let backends = input.take_set(Part::Backends(0), encoded.backends, limits)?;
    input.end()?;
    let length = ByteCount::new(encoded.length);
    Ok(RegionDescriptor::with_set(space, encoded.address, length, backends))
}
