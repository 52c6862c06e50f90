//! Version 1 of what travels, as separate structs, in [postcard](https://postcard.jamesmunns.com).
//!
//! A layout is, one after the other: [`DimensionsV1`], [`HeaderV1`], the agent's name (text), its
//! metadata (bytes), the sets of backends (each a count, and as many names), the regions
//! ([`RegionV1`], and the number of a file where the storage is one). Counts stand in the header, so
//! that no list is read whose length has not been checked against the limits, the geometry, and
//! what is left of the input.
//!
//! What is here never changes. What has to change becomes version 2, beside it.

use std::collections::HashMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use terrane_core::{
    AgentName, Alignment, BackendName, ByteCount, DeviceId, RemoteSpace, StorageKind,
};
use terrane_layout::{
    BlockDimension, ElementFormat, Field, Fingerprint, Geometry, LayoutConfig, LayoutError,
    LayoutKind, TokenOrder,
};

use crate::frame::{HEADER_BYTES, Opened};
use crate::{LayoutDescriptor, Limited, Part, RegionDescriptor, WireError, WireLimits};

/// Kind and config.
#[derive(Serialize, Deserialize)]
struct DimensionsV1 {
    /// 0 fully contiguous; layer separate: 1 block first, 2 outer first.
    kind: u8,
    num_blocks: u32,
    num_layers: u32,
    outer_dim: u32,
    page_size: u32,
    inner_dim: u32,
    /// 0 width, 1 block-scaled, 2 bytes a row.
    element: u8,
    /// The width, the elements a group, or the bytes a row.
    element_first: u32,
    /// The bytes a group, or 0.
    element_second: u32,
    num_heads: Option<u32>,
    /// 0 token-major, 1 head-major.
    token_order: u8,
    /// The exponent of the power of two.
    block_alignment: u32,
}

/// What is known before the lists.
#[derive(Serialize, Deserialize)]
struct HeaderV1 {
    /// Little-endian.
    fingerprint: [u8; 16],
    /// 0 system, 1 pinned, 2 device, 3 disk.
    storage: u8,
    /// The device, or 0.
    device: u32,
    /// How many sets of backends follow.
    sets: u32,
    /// How many regions follow.
    regions: u32,
}

/// A region; where it is follows from the layout's kind of storage, but for files.
#[derive(Serialize, Deserialize)]
struct RegionV1 {
    address: u64,
    length: u64,
    /// Which of the sets of backends accepted it.
    set: u32,
}

/// The fewest bytes that a region takes.
const LEAST_REGION: usize = 3;

/// A region by itself.
#[derive(Serialize, Deserialize)]
struct LoneRegionV1 {
    /// 0 host, 1 device, 2 file.
    space: u8,
    /// The device or the file, or 0.
    number: u64,
    address: u64,
    length: u64,
    /// How many names of backends follow.
    backends: u32,
}

/// Bytes as one run. The serializer would otherwise be asked for each of them.
struct Bytes<'a>(&'a [u8]);

impl Serialize for Bytes<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

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
        let (address, length) = (region.address(), region.length().get());
        regions.push((file, RegionV1 { address, length, set }));
    }
    let (storage, device) = storage_tag(layout.storage())?;
    let header = HeaderV1 {
        fingerprint: layout.fingerprint().to_u128().to_le_bytes(),
        storage,
        device,
        sets: count(Limited::Backends, sets.len())?,
        regions: count(Limited::Regions, regions.len())?,
    };
    let dimensions = dimensions(layout.config(), layout.kind());
    let mut frame = put(Part::Dimensions, &dimensions, frame)?;
    frame = put(Part::Header, &header, frame)?;
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
    Ok(frame)
}

pub(crate) fn read_layout(
    opened: &Opened<'_>,
    limits: &WireLimits,
) -> Result<LayoutDescriptor, WireError> {
    let mut input = Input::new(opened);
    let dimensions: DimensionsV1 = input.take(Part::Dimensions)?;
    limits.check(Limited::Blocks, dimensions.num_blocks.into(), limits.blocks.into())?;
    let (config, kind) = geometry(&dimensions)?;
    let header: HeaderV1 = input.take(Part::Header)?;
    let storage = storage(header.storage, header.device)?;
    limits.check(Limited::Regions, header.regions.into(), limits.regions.into())?;
    let expected = Geometry::new(&config, kind)?.region_count();
    if header.regions != expected {
        return Err(WireError::RegionCount { expected, actual: header.regions.into() });
    }
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
    let mut regions = Vec::with_capacity(input.at_most(header.regions, LEAST_REGION));
    for number in 0..header.regions {
        let part = Part::Region(number);
        let space = match storage {
            StorageKind::Device(device) => RemoteSpace::Device(device),
            StorageKind::Disk => RemoteSpace::File(input.take(part)?),
            _ => RemoteSpace::Host,
        };
        let RegionV1 { address, length, set } = input.take(part)?;
        let backends = sets
            .get(ByteCount::new(set.into()).to_usize())
            .ok_or(WireError::UnknownSet { region: number, set, sets: header.sets })?;
        let length = ByteCount::new(length);
        regions.push(RegionDescriptor::with_set(space, address, length, Arc::clone(backends)));
    }
    input.end()?;

    let layout = LayoutDescriptor::new(config, kind, storage, agent, metadata.to_vec(), regions)?;
    let stated = Fingerprint::from_u128(u128::from_le_bytes(header.fingerprint));
    let computed = layout.fingerprint();
    if stated != computed {
        return Err(WireError::Fingerprint { stated, computed });
    }
    Ok(layout)
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
    let lone = LoneRegionV1 {
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
    let lone: LoneRegionV1 = input.take(Part::Region(0))?;
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

/// Whether a set of backends is as it is written: names, sorted, each once.
pub(crate) fn check_set(number: u32, set: &[BackendName]) -> Result<(), WireError> {
    let of = Part::Backends(number);
    set.iter().try_for_each(|name| check_name(of, name.as_str()))
}

/// A name is one line of text that can be passed on to a C library and printed in an error.
pub(crate) fn check_name(of: Part, name: &str) -> Result<(), WireError> {
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err(WireError::Name { of, name: name.to_owned() });
    }
    Ok(())
}

/// Whether `bytes` are what we would have written. Postcard reads numbers that are longer than need
/// be, and a sender could order what has no order.
pub(crate) fn check_canonical(bytes: &[u8], ours: &[u8]) -> Result<(), WireError> {
    if bytes == ours {
        return Ok(());
    }
    // The frames differ in their length, perhaps, which is of no interest.
    let inside = |frame| <[u8]>::get(frame, HEADER_BYTES..).unwrap_or_default();
    let pairs = inside(bytes).iter().zip(inside(ours));
    let same = pairs.take_while(|(a, b)| a == b).count();
    Err(WireError::NotCanonical { offset: HEADER_BYTES + same })
}

/// What is left to read.
struct Input<'a> {
    rest: &'a [u8],
    /// Where the rest begins, counted from the beginning of the frame.
    offset: usize,
}

impl<'a> Input<'a> {
    fn new(opened: &Opened<'a>) -> Self {
        Self { rest: opened.payload, offset: opened.offset }
    }

    fn take<T: Deserialize<'a>>(&mut self, part: Part) -> Result<T, WireError> {
        let (value, rest) = postcard::take_from_bytes(self.rest)
            .map_err(|cause| malformed(part, self.offset, cause))?;
        // The rest is the end of what it is taken from.
        self.offset += self.rest.len() - rest.len();
        self.rest = rest;
        Ok(value)
    }

    fn take_name(&mut self, part: Part, limits: &WireLimits) -> Result<&'a str, WireError> {
        let name: &str = self.take(part)?;
        let bytes = ByteCount::from_usize(name.len());
        limits.check(Limited::Name, bytes.get(), limits.name.get())?;
        Ok(name)
    }

    fn take_set(
        &mut self,
        part: Part,
        names: u32,
        limits: &WireLimits,
    ) -> Result<Arc<[BackendName]>, WireError> {
        limits.check(Limited::Backends, names.into(), limits.backends.into())?;
        let mut set = Vec::with_capacity(self.at_most(names, 1));
        for _ in 0..names {
            set.push(BackendName::from(self.take_name(part, limits)?));
        }
        if !set.is_sorted_by(|a, b| a < b) {
            return Err(WireError::NotCanonical { offset: self.offset });
        }
        Ok(set.into())
    }

    /// How many of `claimed` things of `least` bytes there is input for.
    fn at_most(&self, claimed: u32, least: usize) -> usize {
        (self.rest.len() / least.max(1)).min(ByteCount::new(claimed.into()).to_usize())
    }

    fn end(self) -> Result<(), WireError> {
        if self.rest.is_empty() {
            return Ok(());
        }
        let extra = ByteCount::from_usize(self.rest.len());
        Err(WireError::TrailingBytes { offset: self.offset, extra })
    }
}

fn put<T: Serialize + ?Sized>(part: Part, value: &T, frame: Vec<u8>) -> Result<Vec<u8>, WireError> {
    let offset = frame.len();
    postcard::to_extend(value, frame).map_err(|cause| malformed(part, offset, cause))
}

fn put_names(part: Part, names: &[BackendName], frame: Vec<u8>) -> Result<Vec<u8>, WireError> {
    names.iter().try_fold(frame, |frame, name| put(part, name.as_str(), frame))
}

fn malformed(part: Part, offset: usize, cause: postcard::Error) -> WireError {
    WireError::Malformed { part, offset, source: Box::new(cause) }
}

fn count(what: Limited, count: usize) -> Result<u32, WireError> {
    let actual = ByteCount::from_usize(count).get();
    let over = |_| WireError::OverLimit { what, actual, limit: u32::MAX.into() };
    u32::try_from(actual).map_err(over)
}

fn dimensions(config: &LayoutConfig, kind: LayoutKind) -> DimensionsV1 {
    let (element, element_first, element_second) = match config.element() {
        ElementFormat::Width(width) => (0, width.into(), 0),
        ElementFormat::BlockScaled { elements, bytes } => (1, elements, bytes),
        ElementFormat::RowBytes(bytes) => (2, bytes, 0),
    };
    DimensionsV1 {
        kind: match kind {
            LayoutKind::FullyContiguous => 0,
            LayoutKind::LayerSeparate { block_dimension: BlockDimension::First } => 1,
            LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second } => 2,
        },
        num_blocks: config.num_blocks(),
        num_layers: config.num_layers(),
        outer_dim: config.outer_dim(),
        page_size: config.page_size(),
        inner_dim: config.inner_dim(),
        element,
        element_first,
        element_second,
        num_heads: config.num_heads(),
        token_order: match config.token_order() {
            TokenOrder::TokenMajor => 0,
            TokenOrder::HeadMajor => 1,
        },
        block_alignment: config.block_alignment().log2(),
    }
}

fn geometry(dimensions: &DimensionsV1) -> Result<(LayoutConfig, LayoutKind), WireError> {
    let kind = match dimensions.kind {
        0 => LayoutKind::FullyContiguous,
        1 => LayoutKind::LayerSeparate { block_dimension: BlockDimension::First },
        2 => LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second },
        tag => return Err(unknown("kind", tag, &[0, 1, 2])),
    };
    let (first, second) = (dimensions.element_first, dimensions.element_second);
    let alone = || unused("element_second", second.into());
    let element = match dimensions.element {
        0 => {
            alone()?;
            let too_wide = |_| LayoutError::FieldOutOfRange {
                field: Field::ElementWidth,
                value: first,
                least: 1,
                largest: 8,
            };
            ElementFormat::Width(u8::try_from(first).map_err(too_wide)?)
        }
        1 => ElementFormat::BlockScaled { elements: first, bytes: second },
        2 => alone().map(|()| ElementFormat::RowBytes(first))?,
        tag => return Err(unknown("element", tag, &[0, 1, 2])),
    };
    let token_order = match dimensions.token_order {
        0 => TokenOrder::TokenMajor,
        1 => TokenOrder::HeadMajor,
        tag => return Err(unknown("token_order", tag, &[0, 1])),
    };
    let exponent = dimensions.block_alignment;
    let block_alignment = 1_u64
        .checked_shl(exponent)
        .and_then(|power| Alignment::new(power).ok())
        .ok_or(WireError::NoSuchAlignment { exponent })?;
    let mut config = LayoutConfig::builder()
        .num_blocks(dimensions.num_blocks)
        .num_layers(dimensions.num_layers)
        .outer_dim(dimensions.outer_dim)
        .page_size(dimensions.page_size)
        .inner_dim(dimensions.inner_dim)
        .element(element)
        .token_order(token_order)
        .block_alignment(block_alignment);
    if let Some(num_heads) = dimensions.num_heads {
        config = config.num_heads(num_heads);
    }
    Ok((config.build()?, kind))
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

fn unknown(field: &'static str, tag: u8, known: &'static [u32]) -> WireError {
    WireError::UnknownTag { field, value: tag.into(), known }
}

fn unused(field: &'static str, value: u64) -> Result<(), WireError> {
    if value == 0 { Ok(()) } else { Err(WireError::Unused { field, value }) }
}
