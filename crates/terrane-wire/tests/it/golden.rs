//! The bytes of version 1, so that the format does not change without somebody noticing.

use terrane_core::{AgentName, Alignment, BackendName, DeviceId, RemoteSpace, StorageKind};
use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutKind, TokenOrder,
};
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};

#[test]
fn placeholder() {
    let config = LayoutConfig::builder()
        .num_blocks(10)
        .num_layers(2)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(128)
        .element(ElementFormat::MXFP4)
        .num_heads(4)
        .token_order(TokenOrder::HeadMajor)
        .block_alignment(Alignment::SECTOR)
        .build()
        .unwrap();
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::Second };
    let length = Geometry::new(&config, kind).unwrap().region_bytes();
    let space = RemoteSpace::Device(DeviceId::new(1));
    let regions = vec![
        RegionDescriptor::new(space, 0x7f00_0000_0000, length, [BackendName::from("UCX")]),
        RegionDescriptor::new(
            space,
            0x7f00_0010_0000,
            length,
            ["UCX", "GDS"].map(BackendName::from),
        ),
    ];
    let storage = StorageKind::Device(DeviceId::new(1));
    let agent = AgentName::from("decode/1");
    let layout =
        LayoutDescriptor::new(config, kind, storage, agent, vec![0, 255, 7], regions).unwrap();
    let bytes = layout.encode().unwrap();
    println!("{}", bytes.iter().map(|b| format!("{b:02x}")).collect::<String>());
    LayoutDescriptor::decode(&bytes, &WireLimits::default()).unwrap();
}
