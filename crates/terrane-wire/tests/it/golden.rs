//! The bytes of version 1, so that the format does not change without somebody noticing. If one of
//! these has to change, it is time for version 2: peers and files have version 1.

use terrane_core::{
    AgentName, Alignment, BackendName, ByteCount, DeviceId, RemoteSpace, StorageKind,
};
use terrane_layout::{
    BlockDimension, ElementFormat, Geometry, LayoutConfig, LayoutKind, TokenOrder,
};
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};

/// As little as a layout can be.
fn least() -> LayoutDescriptor {
    let config = LayoutConfig::builder()
        .num_blocks(1)
        .num_layers(1)
        .outer_dim(1)
        .page_size(1)
        .inner_dim(1)
        .element(ElementFormat::Width(1))
        .build()
        .unwrap();
    let region = RegionDescriptor::new(RemoteSpace::Host, 0x1000, ByteCount::new(1), []);
    let (kind, storage) = (LayoutKind::FullyContiguous, StorageKind::System);
    LayoutDescriptor::new(config, kind, storage, AgentName::from("a"), vec![], vec![region])
        .unwrap()
}

const LEAST: &str = "54657272616e654c01000000280000000001010101010001000000007b94b9713f8f94796ea7da\
    7afc887bcb00000101016100008020010015f3822683a98b4c";

/// Something in every field.
fn most() -> LayoutDescriptor {
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
    let both = ["UCX", "GDS"].map(BackendName::from);
    let regions = vec![
        RegionDescriptor::new(space, 0x7f00_0000_0000, length, [BackendName::from("UCX")]),
        RegionDescriptor::new(space, 0x7f00_0010_0000, length, both),
    ];
    let (agent, storage) = (AgentName::from("decode/1"), StorageKind::Device(DeviceId::new(1)));
    LayoutDescriptor::new(config, kind, storage, agent, vec![0, 255, 7], regions).unwrap()
}

const MOST: &str = "54657272616e654c0100000053000000020a020210800101201101040109360d278e894a30dc78\
                    12b93c3724552502010202086465636f64652f310300ff0701035543580203474453035543588080\
                    808080e01f80f001008080c08080e01f80f00101504acfd103c373d9";

/// In a file, whose number is with the region.
fn file() -> LayoutDescriptor {
    let config = *least().config();
    let region = RegionDescriptor::new(RemoteSpace::File(300), 512, ByteCount::new(1), []);
    let (kind, storage) = (LayoutKind::FullyContiguous, StorageKind::Disk);
    LayoutDescriptor::new(config, kind, storage, AgentName::from("a"), vec![], vec![region])
        .unwrap()
}

const FILE: &str = "54657272616e654c010000002a0000000001010101010001000000007b94b9713f8f94796ea7da\
    7afc887bcb0300010101610000ac028004010051ed0f4963f300c8";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap()).collect()
}

#[test]
fn layouts() {
    for (layout, pinned) in [(least(), LEAST), (most(), MOST), (file(), FILE)] {
        assert_eq!(hex(&layout.encode().unwrap()), pinned);
        let limits = WireLimits::default();
        assert_eq!(LayoutDescriptor::decode(&bytes(pinned), &limits).unwrap(), layout);
    }
}

#[test]
fn regions() {
    let region = |space| {
        RegionDescriptor::new(
            space,
            0x1234,
            ByteCount::kib(1),
            ["UCX", "GDS"].map(BackendName::from),
        )
    };
    let pinned = [
        (
            RemoteSpace::Host,
            "54657272616e6552010000000f0000000000b4248008020347445303554358fda7e02af9d3a12e",
        ),
        (
            RemoteSpace::Device(DeviceId::new(7)),
            "54657272616e6552010000000f0000000107b424800802034744530355435855faad0ac132ce40",
        ),
        (
            RemoteSpace::File(3),
            "54657272616e6552010000000f0000000203b4248008020347445303554358252c1809c679741a",
        ),
    ];
    for (space, pinned) in pinned {
        let region = region(space);
        assert_eq!(hex(&region.encode().unwrap()), pinned);
        let limits = WireLimits::default();
        assert_eq!(RegionDescriptor::decode(&bytes(pinned), &limits).unwrap(), region);
    }
}
