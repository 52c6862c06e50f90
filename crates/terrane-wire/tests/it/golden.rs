//! The bytes of the current versions, which detect unintended changes of the formats. If one of
//! them must change, its version must change too: peers and files use this version.

use terrane_core::{
    AgentName, Alignment, BackendName, ByteCount, DeviceId, RemoteSpace, StorageKind,
};
use terrane_layout::{Axis, AxisSteps, Geometry, LayoutFingerprint, Section, SectionName, Step};
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireError, WireLimits};

/// The smallest possible layout.
fn least(space: RemoteSpace, storage: StorageKind) -> LayoutDescriptor {
    let geometry = Geometry::from_sections([Section::new(SectionName::K, 1)]).unwrap();
    let region = RegionDescriptor::new(space, 0x1000, ByteCount::new(1), []);
    LayoutDescriptor::new(geometry, storage, AgentName::from("a"), vec![], vec![region]).unwrap()
}

const LEAST: &str = "54657272616e654c02000000cf000000ec5fb94d6481643efadd4881e30252b90000010101610000802000b2\
    01020001016b0100000000000000000000000000000000000000000100000000000000000000000100000000\
    0000000000000000000000010000000000000000000000010000000000000000000000000000000100000000\
    0000000000000001000000000000000000000000000000010000000000000000000000010000000000000000\
    0000000000000001000000000000000000000001000000000000000000000001000000010000000100000000\
    0000008cf4497930da67ca";

/// In a file, whose number is part of the region.
const FILE: &str = "54657272616e654c02000000d1000000ec5fb94d6481643efadd4881e30252b90300010101610000ac028020\
    00b201020001016b010000000000000000000000000000000000000000010000000000000000000000010000\
    0000000000000000000000000001000000000000000000000001000000000000000000000000000000010000\
    0000000000000000000100000000000000000000000000000001000000000000000000000001000000000000\
    0000000000000000000100000000000000000000000100000000000000000000000100000001000000010000\
    0000000000bc6e0f3e36f32fc8";

/// A layout with a value in every field.
fn most() -> LayoutDescriptor {
    let layer = AxisSteps::spread(2, 1, Step::ONE);
    let keys = Section::new(SectionName::K, 2)
        .axis(Axis::Block, AxisSteps::new(3, 1024))
        .axis(Axis::Layer, layer)
        .axis(Axis::Head, AxisSteps::new(2, 256))
        .axis(Axis::Token, AxisSteps::new(4, 8))
        .axis(Axis::Element, AxisSteps::split(Step::new(4, 64), Step::new(4, 2)));
    let scales = Section::new(SectionName::SCALES, 4)
        .at(0, 512)
        .axis(Axis::Block, AxisSteps::new(3, 1024))
        .axis(Axis::Layer, layer);
    let lengths = [ByteCount::new(3072), ByteCount::new(4096)];
    let geometry = Geometry::from_sections_in([keys, scales], &lengths)
        .unwrap()
        .with_block_alignment(Alignment::SECTOR);
    let space = RemoteSpace::Device(DeviceId::new(1));
    let both = ["UCX", "GDS"].map(BackendName::from);
    let regions = vec![
        RegionDescriptor::new(space, 0x7f00_0000_0000, lengths[0], [BackendName::from("UCX")]),
        RegionDescriptor::new(space, 0x7f00_0010_0000, lengths[1], both),
    ];
    let (agent, storage) = (AgentName::from("decode/1"), StorageKind::Device(DeviceId::new(1)));
    LayoutDescriptor::new(geometry, storage, agent, vec![0, 255, 7], regions).unwrap()
}

const MOST: &str = "54657272616e654c02000000a30100009b6467245dd7d60adff293d61ca71bb102010202086465636f64652f\
    310300ff0701035543580203474453035543588080808080e01f008080c08080e01f01e202020902016b0200\
    0000010000000000000000000000000000000001000000000000000000000003000000000400000000000001\
    0000000200000000000000000000000100000000000000000000000000000001000000000000000000000002\
    0000000001000000000000000000000100000000000000000000000400000008000000000000000000000004\
    0000004000000000000000040000000200000000000000067363616c65730400000000000000000002000000\
    0000000000000001000000000000000000000003000000000400000000000001000000020000000000000000\
    0000000100000000000000000000000000000001000000000000000000000001000000000000000000000000\
    0000000100000000000000000000000100000000000000000000000000000001000000000000000000000001\
    00000000000000000000000200000001000000000c000000000000010000000010000000000000c9432dcef6\
    a0a69e";

/// The smallest layout in version 1.
const VERSION_1: &str = "54657272616e654c01000000280000000001010101010001000000007b94b9713f8f94796ea7da\
    7afc887bcb00000101016100008020010015f3822683a98b4c";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2).map(|n| u8::from_str_radix(&hex[2 * n..2 * n + 2], 16).unwrap()).collect()
}

#[test]
fn layouts() {
    for (layout, pinned) in [
        (least(RemoteSpace::Host, StorageKind::System), LEAST),
        (least(RemoteSpace::File(300), StorageKind::Disk), FILE),
        (most(), MOST),
    ] {
        assert_eq!(hex(&layout.encode().unwrap()), pinned);
        let limits = WireLimits::default();
        assert_eq!(LayoutDescriptor::decode(&bytes(pinned), &limits).unwrap(), layout);
    }
}

/// The fingerprint is the hash of the encoded bytes.
#[test]
fn the_fingerprint_of_the_largest_is_pinned() {
    assert_eq!(
        LayoutFingerprint::new(most().geometry()).to_string(),
        "v2-b11ba71cd693f2df0ad6d75d2467649b"
    );
}

#[test]
fn version_1_is_refused_by_name() {
    let error = LayoutDescriptor::decode(&bytes(VERSION_1), &WireLimits::default()).unwrap_err();
    assert!(matches!(error, WireError::Version1), "{error}");
    let text = error.to_string();
    assert!(text.contains("version 1") && text.contains("export the layout again"), "{text}");
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
