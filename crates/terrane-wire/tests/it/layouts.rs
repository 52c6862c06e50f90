//! Layouts to describe.

use proptest::prelude::*;
use terrane_core::{AgentName, Alignment, BackendName, DeviceId, RemoteSpace, StorageKind};
use terrane_layout::{ElementFormat, Geometry, LayoutConfig, LayoutKind, TokenOrder};
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

/// A description of `config`, with its regions one after the other from `base` on.
pub fn describe(config: &LayoutConfig, kind: LayoutKind, storage: StorageKind) -> LayoutDescriptor {
    let geometry = Geometry::new(config, kind).unwrap();
    let space = space_of(storage);
    let backends = [BackendName::from("UCX"), BackendName::from("POSIX")];
    let base = 1 << 20;
    let regions = (0..u64::from(geometry.region_count()))
        .map(|n| {
            let address = base + n * geometry.region_bytes().get();
            RegionDescriptor::new(space, address, geometry.region_bytes(), backends.clone())
        })
        .collect();
    let agent = AgentName::from("prefill-0");
    LayoutDescriptor::new(*config, kind, storage, agent, vec![1, 2, 3], regions).unwrap()
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
    let kind = prop::sample::select(LayoutKind::ALL.to_vec());
    let agent = "[a-zäλ][a-z0-9 λ-]{0,20}";
    let metadata = prop::collection::vec(any::<u8>(), 0..300);
    (any_config(), kind, storage, agent, metadata, sets, regions).prop_map(
        |(config, kind, storage, agent, metadata, sets, regions)| {
            let geometry = Geometry::new(&config, kind).unwrap();
            let (length, alignment) = (geometry.region_bytes(), config.block_alignment());
            let mut address = 0_u64;
            let described = (0..geometry.region_count())
                .zip(regions.iter().cycle())
                .map(|(_, (set, gap, file))| {
                    address += gap * alignment.get();
                    let begin = terrane_core::ByteCount::new(address).align_up(alignment).unwrap();
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
            LayoutDescriptor::new(config, kind, storage, agent, metadata, described).unwrap()
        },
    )
}
