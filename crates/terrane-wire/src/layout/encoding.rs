//! Version 2 of a layout's description.
//!
//! A description is a sequence:
//! - [`Header`];
//! - the agent's name (text) and metadata (bytes);
//! - the sets of backends, each a count and as many names;
//! - the regions ([`Region`]), each after its file number if the storage is files;
//! - the [encoding](Geometry::encode) of the geometry (bytes).
//!
//! The header contains the counts, so each is compared with the limits and the remaining input before
//! a list is read. The geometry is last, so it cannot have more regions than were read.
//!
//! This form never changes. Any change is version 3.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use terrane_core::{AgentName, BackendName, ByteCount, DeviceId, RemoteSpace, StorageKind};
use terrane_layout::{DecodeError, EncodedCount, Geometry, GeometryLimits, LayoutFingerprint};

use super::descriptor::LayoutDescriptor;
use crate::error::{Part, WireError};
use crate::frame::FramePayload;
use crate::frame::input::{Bytes, Input, count, put, put_names, unknown, unused};
use crate::limits::{Limited, WireLimits};
use crate::region::descriptor::RegionDescriptor;

/// The fields before the lists.
#[derive(Serialize, Deserialize)]
struct Header {
    /// Little-endian.
    fingerprint: [u8; 16],
    /// 0 system, 1 pinned, 2 device, 3 disk.
    storage: u8,
    /// The device number, or 0.
    device: u32,
    /// The number of sets of backends.
    sets: u32,
    /// The number of regions.
    regions: u32,
}

/// A region. Its space follows from the storage, and its length from the geometry.
#[derive(Serialize, Deserialize)]
struct Region {
    address: u64,
    /// The set of backends that accepted it.
    set: u32,
}

/// The minimum number of bytes of an encoded region.
const MIN_REGION_BYTES: usize = 2;

pub(crate) fn write_layout(
    layout: &LayoutDescriptor,
    frame: Vec<u8>,
) -> Result<Vec<u8>, WireError> {
    let (mut sets, mut numbers) = (Vec::new(), HashMap::new());
    let mut regions = Vec::with_capacity(layout.regions().len());
    for region in layout.regions() {
        let set = *numbers.entry(region.backends()).or_insert_with(|| {
            sets.push(region.backends());
            sets.len() - 1
        });
        let file = match region.space() {
            RemoteSpace::File(number) => Some(number),
            _ => None,
        };
        let set = count(Limited::Backends, set)?;
        regions.push((file, Region { address: region.address(), set }));
    }
    let (storage, device) = storage_tag(layout.storage())?;
    let header = Header {
        fingerprint: layout.fingerprint().to_u128().to_le_bytes(),
        storage,
        device,
        sets: count(Limited::Backends, sets.len())?,
        regions: count(Limited::Regions, regions.len())?,
    };
    let mut frame = put(Part::Header, &header, frame)?;
    frame = put(Part::Agent, layout.agent().as_str(), frame)?;
    frame = put(Part::Metadata, &Bytes(layout.metadata()), frame)?;
    for (number, set) in (0_u32..).zip(sets) {
        let part = Part::Backends(number);
        frame = put(part, &count(Limited::Backends, set.len())?, frame)?;
        frame = put_names(part, set, frame)?;
    }
    for (number, (file, region)) in (0_u32..).zip(regions) {
        let part = Part::Region(number);
        if let Some(file) = file {
            frame = put(part, &file, frame)?;
        }
        frame = put(part, &region, frame)?;
    }
    put(Part::Geometry, &Bytes(&layout.geometry().encode()), frame)
}

pub(crate) fn read_layout(
    payload: &FramePayload<'_>,
    limits: &WireLimits,
) -> Result<LayoutDescriptor, WireError> {
    let mut input = Input::new(payload);
    let header: Header = input.take(Part::Header)?;
    let storage = storage(header.storage, header.device)?;
    limits.check(Limited::Regions, header.regions.into(), limits.regions.into())?;
    limits.check(Limited::Backends, header.sets.into(), limits.backends.into())?;

    let agent = AgentName::from(input.take_name(Part::Agent, limits)?);
    let metadata: &[u8] = input.take(Part::Metadata)?;
    let bytes = ByteCount::from_usize(metadata.len());
    limits.check(Limited::Metadata, bytes.get(), limits.metadata.get())?;

    let mut sets: Vec<Arc<[BackendName]>> = Vec::new();
    for number in 0..header.sets {
        let part = Part::Backends(number);
        let names: u32 = input.take(part)?;
        sets.push(input.take_set(part, names, limits)?);
    }
    let mut places = Vec::with_capacity(input.at_most(header.regions, MIN_REGION_BYTES));
    for number in 0..header.regions {
        let part = Part::Region(number);
        let space = match storage {
            StorageKind::Device(device) => RemoteSpace::Device(device),
            StorageKind::Disk => RemoteSpace::File(input.take(part)?),
            _ => RemoteSpace::Host,
        };
        let Region { address, set } = input.take(part)?;
        let backends = sets
            .get(ByteCount::new(set.into()).to_usize())
            .ok_or(WireError::UnknownSet { region: number, set, sets: header.sets })?;
        places.push((space, address, backends));
    }
    let geometry = geometry(input.take(Part::Geometry)?, header.regions, limits)?;
    input.end()?;

    let regions = (0_u32..).zip(places).map(|(number, (space, address, backends))| {
        let length = geometry.region_bytes(number);
        RegionDescriptor::with_set(space, address, length, Arc::clone(backends))
    });
    let regions = regions.collect();
    let layout = LayoutDescriptor::new(geometry, storage, agent, metadata.to_vec(), regions)?;
    let stated = LayoutFingerprint::from_u128(u128::from_le_bytes(header.fingerprint));
    let computed = layout.fingerprint();
    if stated != computed {
        return Err(WireError::Fingerprint { stated, computed });
    }
    Ok(layout)
}

/// Decodes a geometry for `described` regions.
fn geometry(bytes: &[u8], described: u32, limits: &WireLimits) -> Result<Geometry, WireError> {
    let (blocks, sections) = (limits.blocks, limits.sections);
    let regions = limits.regions.min(described);
    Geometry::decode(bytes, &GeometryLimits { blocks, sections, regions }).map_err(|error| {
        let DecodeError::OverLimit { what, count, limit } = error else { return error.into() };
        let what = match what {
            EncodedCount::Blocks => Limited::Blocks,
            EncodedCount::Sections => Limited::Sections,
            _ => return WireError::RegionCount { expected: count, actual: described.into() },
        };
        WireError::OverLimit { what, actual: count, limit }
    })
}

fn storage_tag(storage: StorageKind) -> Result<(u8, u32), WireError> {
    Ok(match storage {
        StorageKind::System => (0, 0),
        StorageKind::Pinned => (1, 0),
        StorageKind::Device(device) => (2, device.get()),
        StorageKind::Disk => (3, 0),
        _ => return Err(WireError::NotOurs { storage }),
    })
}

fn storage(tag: u8, device: u32) -> Result<StorageKind, WireError> {
    let kind = match tag {
        0 => StorageKind::System,
        1 => StorageKind::Pinned,
        2 => return Ok(StorageKind::Device(DeviceId::new(device))),
        3 => StorageKind::Disk,
        tag => return Err(unknown("storage", tag, &[0, 1, 2, 3])),
    };
    unused("device", device.into()).map(|()| kind)
}
