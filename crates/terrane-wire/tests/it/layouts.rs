//! Layouts to describe.

use proptest::prelude::*;
use terrane_core::{AgentName, Alignment, BackendName, DeviceId, RemoteSpace, StorageKind};
use terrane_layout::{
    Axis, AxisSteps, ElementFormat, Geometry, LayoutConfig, LayoutKind, Section, SectionName, Step,
    TokenOrder,
};
use terrane_wire::{LayoutDescriptor, RegionDescriptor};

/// Llama 3.1 8B, 64 blocks of 16 tokens.
pub fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(64)
        .num_layers(32)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(1024)
        .element(ElementFormat::Width(2))
        .num_heads(8)
        .build()
        .unwrap()
}

pub fn geometry(config: &LayoutConfig, kind: LayoutKind) -> Geometry {
    Geometry::new(config, kind).unwrap()
}

/// A description of `geometry`, with its regions one after the other from 1 MiB on.
pub fn describe(geometry: &Geometry, storage: StorageKind) -> LayoutDescriptor {
    let space = space_of(storage);
    let backends = [BackendName::from("UCX"), BackendName::from("POSIX")];
    let mut address = 1 << 20;
    let regions = (0..geometry.region_count())
        .map(|region| {
            let length = geometry.region_bytes(region);
            let begin = address;
            address += length.get();
            RegionDescriptor::new(space, begin, length, backends.clone())
        })
        .collect();
    let agent = AgentName::from("prefill-0");
    LayoutDescriptor::new(geometry.clone(), storage, agent, vec![1, 2, 3], regions).unwrap()
}

/// Values and scales of an indexer with padded blocks, and a state without tokens in another region.
pub fn several_sections(blocks: u32, layers: u32) -> Geometry {
    let block = AxisSteps::new(blocks, 64 * 132 + 256);
    let layer = AxisSteps::spread(layers, 2, Step::ONE);
    let section = |name, bytes| Section::new(name, bytes).axis(Axis::Layer, layer);
    let values = section(SectionName::VALUES, 1)
        .axis(Axis::Block, block)
        .axis(Axis::Token, AxisSteps::new(64, 128))
        .axis(Axis::Element, AxisSteps::new(128, 1));
    let scales = section(SectionName::SCALES, 4)
        .at(0, 64 * 128)
        .axis(Axis::Block, block)
        .axis(Axis::Token, AxisSteps::new(64, 4));
    let state = section(SectionName::STATE, 4)
        .at(1, 0)
        .axis(Axis::Block, AxisSteps::new(blocks, 400))
        .axis(Axis::Element, AxisSteps::new(100, 4));
    Geometry::from_sections([values, scales, state]).unwrap()
}

/// Keys as paged attention has them: `[B, H, D/x, N, x]`.
pub fn split_elements(blocks: u32) -> Geometry {
    let section = Section::new(SectionName::K, 2)
        .axis(Axis::Block, AxisSteps::new(blocks, 2 * 8 * 128 * 16))
        .axis(Axis::Head, AxisSteps::new(8, 2 * 128 * 16))
        .axis(Axis::Token, AxisSteps::new(16, 16))
        .axis(Axis::Element, AxisSteps::split(Step::new(16, 256), Step::new(8, 2)));
    Geometry::from_sections([section]).unwrap()
}

pub fn space_of(storage: StorageKind) -> RemoteSpace {
    match storage {
        StorageKind::Device(device) => RemoteSpace::Device(device),
        StorageKind::Disk => RemoteSpace::File(7),
        _ => RemoteSpace::Host,
    }
}

pub const STORAGE: [StorageKind; 4] = [
    StorageKind::System,
    StorageKind::Pinned,
    StorageKind::Device(DeviceId::new(3)),
    StorageKind::Disk,
];

/// Configs in which every field varies.
pub fn any_config() -> impl Strategy<Value = LayoutConfig> {
    let element = prop_oneof![
        (1_u8..=8).prop_map(ElementFormat::Width),
        Just(ElementFormat::MXFP4),
        Just(ElementFormat::NVFP4),
        (1_u32..64).prop_map(|bytes| ElementFormat::RowBytes(bytes * 8)),
    ];
    let counts = (1_u32..2000, 1_u32..100, 1_u32..=2, 1_u32..300, 1_u32..100);
    let heads = prop::option::of((prop::sample::select(vec![1_u32, 2, 4, 8]), any::<bool>()));
    (counts, element, heads, 0_u32..14).prop_map(|(counts, element, heads, alignment)| {
        let (blocks, layers, outers, page, rows) = counts;
        let mut builder = LayoutConfig::builder()
            .num_blocks(blocks)
            .num_layers(layers)
            .outer_dim(outers)
            .page_size(page)
            // So that it is divided by heads and groups alike.
            .inner_dim(rows * 256)
            .element(element)
            .block_alignment(Alignment::new(1 << alignment).unwrap());
        if let Some((heads, head_major)) = heads {
            let order = if head_major { TokenOrder::HeadMajor } else { TokenOrder::TokenMajor };
            builder = builder.num_heads(heads).token_order(order);
        }
        builder.build().unwrap()
    })
}

/// Geometries of configs, and of several sections.
pub fn any_geometry() -> impl Strategy<Value = Geometry> {
    let kind = prop::sample::select(LayoutKind::ALL.to_vec());
    prop_oneof![
        4 => (any_config(), kind).prop_map(|(config, kind)| geometry(&config, kind)),
        1 => (1_u32..300, 1_u32..40).prop_map(|(blocks, layers)| several_sections(blocks, layers)),
        1 => (1_u32..300).prop_map(split_elements),
        1 => (1_u32..300, 1_u32..5000).prop_map(|(n, bytes)| Geometry::opaque(n, bytes).unwrap()),
    ]
}

/// Descriptions in which everything varies that may.
pub fn any_layout() -> impl Strategy<Value = LayoutDescriptor> {
    let storage = prop_oneof![
        Just(StorageKind::System),
        Just(StorageKind::Pinned),
        any::<u32>().prop_map(|device| StorageKind::Device(DeviceId::new(device))),
        Just(StorageKind::Disk),
    ];
    let sets = prop::collection::vec(prop::collection::vec("[A-Z][A-Z_]{0,7}", 0..4), 1..4);
    let region = (any::<prop::sample::Index>(), 0_u64..3, any::<u32>());
    let regions = prop::collection::vec(region, 100);
    let agent = "[a-zäλ][a-z0-9 λ-]{0,20}";
    let metadata = prop::collection::vec(any::<u8>(), 0..300);
    (any_geometry(), storage, agent, metadata, sets, regions).prop_map(
        |(geometry, storage, agent, metadata, sets, regions)| {
            let alignment = geometry.block_alignment();
            let mut address = 0_u64;
            let described = (0..geometry.region_count())
                .zip(regions.iter().cycle())
                .map(|(number, (set, gap, file))| {
                    address += gap * alignment.get();
                    let begin = terrane_core::ByteCount::new(address).align_up(alignment).unwrap();
                    let length = geometry.region_bytes(number);
                    address = begin.get() + length.get();
                    let space = match storage {
                        StorageKind::Disk => RemoteSpace::File((*file).into()),
                        other => space_of(other),
                    };
                    let set = set.get(&sets).iter().map(|name| BackendName::from(name.as_str()));
                    RegionDescriptor::new(space, begin.get(), length, set)
                })
                .collect();
            let agent = AgentName::from(agent.as_str());
            LayoutDescriptor::new(geometry, storage, agent, metadata, described).unwrap()
        },
    )
}
