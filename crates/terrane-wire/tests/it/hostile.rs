//! What nobody honest sends: refused, by name, for the price of reading it.

use proptest::prelude::*;
use terrane_core::{BackendName, ByteCount, RemoteSpace, StorageKind};
use terrane_layout::{BlockDimension, Geometry, LayoutKind};
use terrane_testkit::damage::Damage;
use terrane_wire::{LayoutDescriptor, Limited, RegionDescriptor, WireError, WireLimits};

use crate::allocations::allocated;
use crate::corpus::{Handmade, refuse};
use crate::frames::{HEADER, frame, layout_frame, payload};
use crate::layouts::{any_layout, config, describe};

/// What reading may allocate for each byte of input, its own copy of names and metadata, the
/// regions, and the encoding that it is compared with included.
const FOR_EACH_BYTE: u64 = 64;
/// What an error and an empty list take.
const BESIDES: u64 = 8 << 10;

/// Reads `bytes`, and holds what that allocates against what they justify.
pub fn read(bytes: &[u8]) -> Result<LayoutDescriptor, WireError> {
    let (spent, read) = allocated(|| LayoutDescriptor::decode(bytes, &WireLimits::default()));
    let justified = FOR_EACH_BYTE * u64::try_from(bytes.len()).unwrap() + BESIDES;
    assert!(spent <= justified, "{spent} B for {} B of input", bytes.len());
    read
}

/// Either refused, or the one encoding of what was read.
pub fn read_or_refused(bytes: &[u8]) -> Result<(), TestCaseError> {
    match read(bytes) {
        Ok(layout) => prop_assert_eq!(layout.encode().unwrap(), bytes),
        Err(error) => prop_assert!(!error.to_string().is_empty()),
    }
    Ok(())
}

proptest! {
    /// On its way, anything may happen to a frame: it arrives as it was, or not at all.
    #[test]
    fn damage_is_noticed(
        layout in any_layout(),
        damage in Damage::up_to(3),
    ) {
        let sent = layout.encode().unwrap();
        let mut bytes = sent.clone();
        damage.iter().for_each(|damage| damage.apply(&mut bytes));
        match read(&bytes) {
            Ok(_) => prop_assert_eq!(bytes, sent),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    /// Whoever means harm computes the checksum.
    #[test]
    fn what_is_inside_is_not_believed(
        layout in any_layout(),
        damage in Damage::up_to(5),
    ) {
        let mut inside = payload(&layout.encode().unwrap()).to_vec();
        damage.iter().for_each(|damage| damage.apply(&mut inside));
        read_or_refused(&layout_frame(&inside))?;
    }

    #[test]
    fn anything_may_be_inside(inside in prop::collection::vec(any::<u8>(), 0..400)) {
        read_or_refused(&layout_frame(&inside))?;
        let region = RegionDescriptor::decode(&frame(b"TerraneR", 1, &inside), &WireLimits::default());
        if let Ok(region) = region {
            let bytes = region.encode().unwrap();
            prop_assert_eq!(payload(&bytes), inside);
        }
    }

    #[test]
    fn anything_may_arrive(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(read(&bytes).is_err());
        prop_assert!(RegionDescriptor::decode(&bytes, &WireLimits::default()).is_err());
    }
}

fn layout() -> LayoutDescriptor {
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    describe(&config().with_num_layers(2).unwrap(), kind, StorageKind::System)
}

/// The payload of [`layout`], with this part of it exchanged.
fn with(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut inside = payload(&layout().encode().unwrap()).to_vec();
    change(&mut inside);
    layout_frame(&inside)
}

/// Where things are in the payload of [`layout`]. Its dimensions: kind, 64 blocks, 2 layers, 2
/// outers, 16 tokens, 1024 elements (2 bytes), element (3), heads (2), order, alignment.
const KIND: usize = 0;
const BLOCKS: usize = 1;
const OUTERS: usize = 3;
const ELEMENT: usize = 7;
const HEADS: usize = 10;
const ORDER: usize = 12;
const ALIGNMENT: usize = 13;
/// Then the fingerprint (16), storage, device, one set, two regions.
const FINGERPRINT: usize = 14;
const STORAGE: usize = 30;
const DEVICE: usize = 31;
const SETS: usize = 32;
const REGIONS: usize = 33;
/// `prefill-0`, with its length.
const AGENT: usize = 34;
const METADATA: usize = 44;
/// Two names, `POSIX` and `UCX`, each with its length.
const NAMES: usize = 48;
/// Address (3 bytes: 2^20), length (4: 4 MiB), set.
const REGION_0: usize = 59;
const REGION_1: usize = REGION_0 + 8;

const MOST: [u8; 5] = [0xff, 0xff, 0xff, 0xff, 0x0f];

fn handmade() -> Vec<Handmade> {
    let sent = layout().encode().unwrap();
    let flipped = |at: usize| {
        let mut bytes = sent.clone();
        bytes[at] ^= 1;
        bytes
    };
    let inside = payload(&sent);
    vec![
        ("empty", vec![], "takes 24 B, and 0 B are here"),
        ("cut-in-magic", sent[..5].to_vec(), "takes 24 B, and 5 B are here"),
        ("cut-in-header", sent[..HEADER - 1].to_vec(), "and 15 B are here"),
        ("cut-in-payload", sent[..HEADER + 9].to_vec(), "send all of it"),
        ("cut-in-checksum", sent[..sent.len() - 1].to_vec(), "send all of it"),
        ("trailing", [&sent[..], b"x"].concat(), "1 B follow the end"),
        ("other-magic", flipped(0), "begins with \"UerraneL\" and not with \"TerraneL\""),
        ("a-region", frame(b"TerraneR", 1, inside), "begins with \"TerraneR\""),
        ("version-2", frame(b"TerraneL", 2, inside), "is of version 2, and known here: 1"),
        ("version-0", frame(b"TerraneL", 0, inside), "is of version 0, and known here: 1"),
        ("damaged-version", flipped(8), "is damaged"),
        ("damaged-payload", flipped(HEADER), "is damaged"),
        ("damaged-checksum", flipped(sent.len() - 1), "is damaged"),
        ("no-payload", layout_frame(&[]), "the dimensions, from byte 16 on, cannot be read"),
        ("trailing-inside", with(|p| p.push(0)), "1 B follow the end"),
        ("kind-3", with(|p| p[KIND] = 3), "kind is 3; there are 0, 1, 2"),
        ("no-blocks", with(|p| p[BLOCKS] = 0), "num_blocks is 0"),
        (
            "most-blocks",
            with(|p| splice(p, BLOCKS, 1, &MOST)),
            "the number of blocks is 4294967295, and the limit is 4194304",
        ),
        ("3-outers", with(|p| p[OUTERS] = 3), "outer_dim is 3"),
        ("element-9", with(|p| p[ELEMENT] = 9), "element is 9; there are 0, 1, 2"),
        ("width-0", with(|p| p[ELEMENT + 1] = 0), "is 0; it must be 1 to 8"),
        ("width-300", with(|p| splice(p, ELEMENT + 1, 1, &[0xac, 2])), "is 300; it must be 1 to 8"),
        ("second-of-width", with(|p| p[ELEMENT + 2] = 1), "element_second is 1"),
        ("3-heads", with(|p| p[HEADS + 1] = 3), "no multiple of the 3 heads"),
        ("option-2", with(|p| p[HEADS] = 2), "the dimensions, from byte 16 on, cannot be read"),
        ("order-2", with(|p| p[ORDER] = 2), "token_order is 2; there are 0, 1"),
        ("alignment-64", with(|p| p[ALIGNMENT] = 64), "block_alignment is 2^64"),
        ("alignment-63", with(|p| p[ALIGNMENT] = 63), "64 bits|layout takes"),
        ("alignment-21", with(|p| p[ALIGNMENT] = 21), "geometry says|multiple"),
        ("long-number", with(|p| splice(p, BLOCKS, 1, &[0xc0, 0])), "byte 17 is not as"),
        ("endless-number", with(|p| splice(p, BLOCKS, 1, &[0xff; 6])), "the dimensions"),
        ("other-fingerprint", with(|p| p[FINGERPRINT] ^= 1), "the fingerprint is"),
        ("storage-4", with(|p| p[STORAGE] = 4), "storage is 4; there are 0, 1, 2, 3"),
        ("device-of-host", with(|p| p[DEVICE] = 1), "device is 1, and nothing uses it"),
        ("most-sets", with(|p| splice(p, SETS, 1, &MOST)), "number of backends is 4294967295"),
        ("no-sets", with(|p| p[SETS] = 0), "follow the end|region 0 names set"),
        ("most-regions", with(|p| splice(p, REGIONS, 1, &MOST)), "number of regions is 4294967295"),
        ("1-region", with(|p| p[REGIONS] = 1), "has 2 regions, and 1 are described"),
        ("3-regions", with(|p| p[REGIONS] = 3), "has 2 regions, and 3 are described"),
        (
            "longest-agent",
            with(|p| splice(p, AGENT, 1, &MOST)),
            "the agent's name, from byte 50 on",
        ),
        ("no-agent", with(|p| splice(p, AGENT, 10, &[0])), "the agent's name is \"\""),
        ("agent-with-nul", with(|p| p[AGENT + 1] = 0), "the agent's name is \"\\0refill-0\""),
        ("agent-no-text", with(|p| p[AGENT + 1] = 0xff), "the agent's name, from byte 50 on"),
        ("longest-metadata", with(|p| splice(p, METADATA, 1, &MOST)), "the agent's metadata, from"),
        ("most-names", with(|p| splice(p, NAMES, 1, &MOST)), "number of backends is 4294967295"),
        ("names-unsorted", with(|p| p[NAMES + 2] = b'Z'), "is not as"),
        ("name-with-newline", with(|p| p[NAMES + 2] = b'\n'), "is \"\\nOSIX\""),
        ("unknown-set", with(|p| p[REGION_0 + 7] = 1), "region 0 names set 1 of backends"),
        ("other-length", with(|p| p[REGION_0 + 4] ^= 1), "region 0 has"),
        (
            "address-overflow",
            with(|p| splice(p, REGION_0, 3, &[255, 255, 255, 255, 255, 255, 255, 255, 255, 1])),
            "region 0 leaves its address space",
        ),
        (
            "same-region-twice",
            with(|p| {
                let region: Vec<u8> = p[REGION_0..REGION_1].to_vec();
                p.truncate(REGION_1);
                p.extend(region);
            }),
            "regions 0 and 1 overlap",
        ),
    ]
}

fn splice(bytes: &mut Vec<u8>, at: usize, count: usize, with: &[u8]) {
    bytes.splice(at..at + count, with.iter().copied());
}

#[test]
fn the_corpus_is_refused() {
    refuse("layouts", &handmade(), read);
}

#[test]
fn limits_are_the_receivers() {
    let bytes = layout().encode().unwrap();
    let length = ByteCount::from_usize(bytes.len());
    let generous = WireLimits {
        bytes: length,
        metadata: ByteCount::new(3),
        name: ByteCount::new(9),
        blocks: 64,
        regions: 2,
        backends: 2,
    };
    assert!(LayoutDescriptor::decode(&bytes, &generous).is_ok());
    let cases = [
        (WireLimits { bytes: ByteCount::new(length.get() - 1), ..generous }, Limited::Bytes),
        (WireLimits { metadata: ByteCount::new(2), ..generous }, Limited::Metadata),
        (WireLimits { name: ByteCount::new(8), ..generous }, Limited::Name),
        (WireLimits { blocks: 63, ..generous }, Limited::Blocks),
        (WireLimits { regions: 1, ..generous }, Limited::Regions),
        (WireLimits { backends: 1, ..generous }, Limited::Backends),
    ];
    for (limits, limited) in cases {
        match LayoutDescriptor::decode(&bytes, &limits) {
            Err(WireError::OverLimit { what, actual, limit }) => {
                assert_eq!(what, limited);
                assert_eq!(actual, limit + 1);
            }
            other => panic!("{limited:?}: {other:?}"),
        }
    }
}

/// What cannot be read cannot be made either.
#[test]
fn descriptions_are_checked_where_they_are_made() {
    let good = layout();
    let geometry = Geometry::new(good.config(), good.kind()).unwrap();
    let length = geometry.region_bytes();
    let make = |storage, agent: &str, regions: Vec<RegionDescriptor>| {
        let (config, kind) = (*good.config(), good.kind());
        LayoutDescriptor::new(config, kind, storage, agent.into(), vec![], regions)
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let at =
        |space, address| RegionDescriptor::new(space, address, length, [BackendName::from("UCX")]);
    let host = |address| at(RemoteSpace::Host, address);
    let next = 4096 + length.get();
    let system = StorageKind::System;
    assert_eq!(make(system, "a", vec![host(4096), host(next)]), Ok(()));
    for (storage, agent, regions, expected) in [
        (system, "a", vec![host(4096)], "has 2 regions, and 1 are described"),
        (system, "", vec![host(4096), host(next)], "the agent's name is \"\""),
        (system, "a\u{7}", vec![host(4096), host(next)], "the agent's name is"),
        (system, "a", vec![host(next - 1), host(4096)], "regions 0 and 1 overlap"),
        (system, "a", vec![host(4096), host(4096)], "regions 0 and 1 overlap"),
        (system, "a", vec![host(4096), host(u64::MAX)], "region 1 leaves its address space"),
        (
            system,
            "a",
            vec![host(4096), at(RemoteSpace::File(1), next)],
            "region 1 is in file 1 space, and the layout in system memory",
        ),
        (
            StorageKind::Disk,
            "a",
            vec![at(RemoteSpace::File(1), 0), at(RemoteSpace::File(1), i64::MAX.unsigned_abs())],
            "region 1 leaves its address space",
        ),
        (
            StorageKind::Remote(terrane_core::PeerId::next()),
            "a",
            vec![host(4096), host(next)],
            "cannot be described to others",
        ),
    ] {
        let error = make(storage, agent, regions).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // The same positions of two files, or up to the last address, are nobody else's.
    let files = vec![at(RemoteSpace::File(1), 0), at(RemoteSpace::File(2), 0)];
    assert_eq!(make(StorageKind::Disk, "a", files), Ok(()));
    let last = u64::MAX - length.get();
    assert_eq!(make(system, "a", vec![host(last), host(4096)]), Ok(()));
}
