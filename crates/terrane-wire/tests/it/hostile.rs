//! Forged descriptions: each is refused with its own error, at the cost of reading it.

use proptest::prelude::*;
use terrane_core::{BackendName, ByteCount, RemoteSpace, StorageKind};
use terrane_layout::{BlockDimension, LayoutKind};
use terrane_testkit::damage::Damage;
use terrane_wire::{LayoutDescriptor, Limited, RegionDescriptor, WireError, WireLimits};

use crate::allocations::allocated;
use crate::corpus::{Handmade, refuse};
use crate::frames::{HEADER, frame, layout_frame, payload};
use crate::layouts::{any_layout, config, describe, geometry, several_sections};

/// The maximum number of allocated bytes per byte of input. It includes copies of names and
/// metadata, the regions, and the encoding that the input is compared with.
const FOR_EACH_BYTE: u64 = 64;
/// The size of an error and an empty list.
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

    /// A forger computes the checksum too.
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
    describe(&geometry(&config().with_num_layers(2).unwrap(), kind), StorageKind::System)
}

/// The payload of [`layout`], with this part of it exchanged.
fn with(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut inside = payload(&layout().encode().unwrap()).to_vec();
    change(&mut inside);
    layout_frame(&inside)
}

/// The payload of [`layout`] with other bytes for its geometry.
fn with_geometry(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut encoded = layout().geometry().encode();
    change(&mut encoded);
    framed_geometry(&encoded)
}

/// The payload of [`layout`] up to its geometry, and these bytes in its place.
pub fn framed_geometry(encoded: &[u8]) -> Vec<u8> {
    let mut inside = payload(&layout().encode().unwrap())[..GEOMETRY].to_vec();
    inside.extend(written(u32::try_from(encoded.len()).unwrap()));
    inside.extend(encoded);
    layout_frame(&inside)
}

/// A number as postcard writes it: seven bits a byte, the lowest first.
fn written(mut number: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    loop {
        let [low, ..] = (number & 0x7f).to_le_bytes();
        number >>= 7;
        if number == 0 {
            bytes.push(low);
            return bytes;
        }
        bytes.push(low | 0x80);
    }
}

/// Where things are in the payload of [`layout`]: the fingerprint (16), storage, device, one set, two
/// regions.
const FINGERPRINT: usize = 0;
const STORAGE: usize = 16;
const DEVICE: usize = 17;
const SETS: usize = 18;
const REGIONS: usize = 19;
/// `prefill-0`, with its length.
const AGENT: usize = 20;
const METADATA: usize = 30;
/// Two names, `POSIX` and `UCX`, each with its length.
const NAMES: usize = 34;
/// Address (3 bytes: 2^20) and set, then address (4: 5 · 2^20) and set.
const REGION_0: usize = 45;
const REGION_1: usize = 49;
const GEOMETRY: usize = 54;

/// Where things are in the encoding of its geometry: version, alignment, two sections.
const ALIGNMENT: usize = 1;
const SECTIONS: usize = 2;
const KEYS: usize = 3;
const VALUES: usize = KEYS + SECTION;
const RUNS: usize = VALUES + SECTION;
/// The length of a section: name (2), element (4), heads (1), region (4), offset (8), five axes.
const SECTION: usize = 19 + 5 * AXIS;
const ELEMENT: usize = KEYS + 2;
const HEADS: usize = KEYS + 6;
const REGION: usize = KEYS + 7;
const OFFSET: usize = KEYS + 11;
/// Regions (4), outer count (4) and stride (8), inner count (4) and stride (8).
const AXIS: usize = 28;
const BLOCK: usize = KEYS + 19;
const LAYER: usize = BLOCK + AXIS;
const HEAD: usize = LAYER + AXIS;
const OUTER: usize = 4;
const OUTER_STRIDE: usize = 8;
const COUNT: usize = 16;
const STRIDE: usize = 20;

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
        ("empty", vec![], "needs 24 B, and the input has 0 B"),
        ("cut-in-magic", sent[..5].to_vec(), "needs 24 B, and the input has 5 B"),
        ("cut-in-header", sent[..HEADER - 1].to_vec(), "and the input has 15 B"),
        ("cut-in-payload", sent[..HEADER + 9].to_vec(), "pass all of it"),
        ("cut-in-checksum", sent[..sent.len() - 1].to_vec(), "pass all of it"),
        ("trailing", [&sent[..], b"x"].concat(), "1 B follow the end"),
        ("other-magic", flipped(0), "begins with \"UerraneL\" instead of \"TerraneL\""),
        ("a-region", frame(b"TerraneR", 1, inside), "begins with \"TerraneR\""),
        ("version-1", frame(b"TerraneL", 1, inside), "has version 1, which contains no strides"),
        (
            "version-3",
            frame(b"TerraneL", 3, inside),
            "has version 3, and this library reads version 2",
        ),
        (
            "version-0",
            frame(b"TerraneL", 0, inside),
            "has version 0, and this library reads version 2",
        ),
        ("damaged-version", flipped(8), "is damaged"),
        ("damaged-payload", flipped(HEADER), "is damaged"),
        ("damaged-checksum", flipped(sent.len() - 1), "is damaged"),
        ("no-payload", layout_frame(&[]), "the header at byte 16 cannot be decoded"),
        ("trailing-inside", with(|p| p.push(0)), "1 B follow the end"),
        ("long-number", with(|p| splice(p, REGIONS, 1, &[0x82, 0])), "not canonical from byte 35"),
        ("endless-number", with(|p| splice(p, REGIONS, 1, &[0xff; 6])), "the header"),
        ("other-fingerprint", with(|p| p[FINGERPRINT] ^= 1), "the fingerprint is"),
        (
            "storage-4",
            with(|p| p[STORAGE] = 4),
            "storage has the unknown tag 4; the known tags are 0, 1, 2, 3",
        ),
        ("device-of-host", with(|p| p[DEVICE] = 1), "device is 1, but it is unused"),
        ("most-sets", with(|p| splice(p, SETS, 1, &MOST)), "number of backends is 4294967295"),
        ("no-sets", with(|p| p[SETS] = 0), "follow the end|region 0 refers to set"),
        ("most-regions", with(|p| splice(p, REGIONS, 1, &MOST)), "number of regions is 4294967295"),
        ("1-region", with(|p| p[REGIONS] = 1), "the geometry at byte|described"),
        ("3-regions", with(|p| p[REGIONS] = 3), "region 2 refers to set|described"),
        ("longest-agent", with(|p| splice(p, AGENT, 1, &MOST)), "the agent's name at byte 36"),
        (
            "no-agent",
            with(|p| splice(p, AGENT, 10, &[0])),
            "\"\" is not a valid name (the agent's name)",
        ),
        ("agent-with-nul", with(|p| p[AGENT + 1] = 0), "\"\\0refill-0\" is not a valid name"),
        ("agent-no-text", with(|p| p[AGENT + 1] = 0xff), "the agent's name at byte 36"),
        ("longest-metadata", with(|p| splice(p, METADATA, 1, &MOST)), "the agent's metadata at"),
        ("most-names", with(|p| splice(p, NAMES, 1, &MOST)), "number of backends is 4294967295"),
        ("names-unsorted", with(|p| p[NAMES + 2] = b'Z'), "is not canonical"),
        ("name-with-newline", with(|p| p[NAMES + 2] = b'\n'), "\"\\nOSIX\" is not a valid name"),
        ("unknown-set", with(|p| p[REGION_0 + 3] = 1), "region 0 refers to set 1 of backends"),
        (
            "address-overflow",
            with(|p| splice(p, REGION_0, 3, &[255, 255, 255, 255, 255, 255, 255, 255, 255, 1])),
            "region 0 exceeds its address space",
        ),
        (
            "same-region-twice",
            with(|p| {
                let region: Vec<u8> = p[REGION_0..REGION_1].to_vec();
                splice(p, REGION_1, GEOMETRY - REGION_1, &region);
            }),
            "regions 0 and 1 overlap",
        ),
    ]
}

/// Geometries that no sections have.
fn handmade_geometries() -> Vec<Handmade> {
    let number = |at: usize, number: u32| {
        with_geometry(|g| g[at..at + 4].copy_from_slice(&number.to_le_bytes()))
    };
    let long = |at: usize, number: u64| {
        with_geometry(|g| g[at..at + 8].copy_from_slice(&number.to_le_bytes()))
    };
    let byte = |at: usize, value: u8| with_geometry(|g| g[at] = value);
    let (nested, past) = ("less than the", "reaches past 2^63");
    vec![
        ("geometry-version-1", byte(0, 1), "encoded in version 1"),
        ("geometry-cut", with_geometry(|g| g.truncate(100)), "needs 4 bytes from byte 98 on|needs"),
        ("geometry-longer", with_geometry(|g| g.push(0)), "1 bytes follow the end of the layout"),
        ("no-geometry", with_geometry(Vec::clear), "needs 1 bytes from byte 0 on"),
        ("alignment-64", byte(ALIGNMENT, 64), "block alignment is 2^64"),
        ("alignment-255", byte(ALIGNMENT, 255), "block alignment is 2^255"),
        ("alignment-21", byte(ALIGNMENT, 21), "not a multiple of the block alignment, 2097152"),
        ("no-sections", byte(SECTIONS, 0), "and 2 are described"),
        ("most-sections", byte(SECTIONS, 255), "number of sections is 255, and the limit is 16"),
        ("name-of-no-bytes", byte(KEYS, 0), "\"\" is not the name of a section"),
        ("name-in-capitals", byte(KEYS + 1, b'K'), "\"K\" is not the name of a section"),
        ("name-no-text", byte(KEYS + 1, 0xff), "is not the name of a section"),
        ("same-name-twice", byte(VALUES + 1, b'k'), "two sections are named k"),
        ("element-of-no-bytes", number(ELEMENT, 0), "a count or a size of zero"),
        ("flag-2", byte(HEADS, 2), "a flag is 0 or 1"),
        ("heads-of-no-flag", byte(HEADS, 0), "not in its one encoding at byte 78"),
        (
            "most-blocks",
            number(BLOCK + COUNT, u32::MAX),
            "the number of blocks is 4294967295, and the limit is 4194304",
        ),
        ("no-blocks", number(BLOCK + COUNT, 0), "the block axis has a count or a size of zero"),
        ("no-groups", number(LAYER + OUTER, 0), "the layer axis has a count or a size of zero"),
        ("other-blocks", number(BLOCK + COUNT, 63), "and the layout has 63"),
        ("stride-0", long(BLOCK + STRIDE, 0), nested),
        ("stride-negative", long(BLOCK + STRIDE, (-65_536_i64).cast_unsigned()), past),
        ("stride-most", long(BLOCK + STRIDE, u64::MAX), past),
        ("stride-half", long(BLOCK + STRIDE, 1 << 58), past),
        (
            "stride-less-by-one",
            long(HEAD + STRIDE, 255),
            "the head axis has a stride of 255, less than the 256",
        ),
        ("stride-of-a-byte", long(HEAD + STRIDE, 1), nested),
        ("sections-apart-by-one-less", long(OFFSET, 1), "overlap or interleave at byte 32768"),
        ("sections-interleaved", long(BLOCK + STRIDE, 65_535), "overlap or interleave"),
        ("offset-most", long(OFFSET, u64::MAX), past),
        ("offset-behind-the-region", long(OFFSET, 4 << 20), "of region 0, which has 4194304 bytes"),
        ("region-most", number(REGION, u32::MAX), past),
        ("region-1", number(REGION, 1), "of region 2, which has 0 bytes"),
        ("regions-apart-most", number(LAYER, u32::MAX), past),
        ("regions-apart-many", number(LAYER, 1 << 19), "of region 524288, which has 0 bytes"),
        ("layers-3", number(LAYER + OUTER, 3), "and the layout has 3"),
        ("stride-of-regions", long(LAYER + OUTER_STRIDE, 8), "one encoding at byte 50"),
        ("stride-of-one", long(BLOCK + OUTER_STRIDE, 8), "one encoding at byte 22"),
        ("most-runs", number(RUNS, u32::MAX), "has 4294967295 regions, and 2 are described"),
        ("no-runs", with_geometry(|g| drop(g.splice(RUNS.., [0; 4]))), "has 0 bytes"),
        ("run-of-0", number(RUNS + 4, 0), "one encoding"),
        ("run-of-1", number(RUNS + 4, 1), "of region 1, which has 0 bytes"),
        ("run-of-3", number(RUNS + 4, 3), "has 3 regions, and 2 are described"),
        ("run-of-most", number(RUNS + 4, u32::MAX), "has 4294967295 regions, and 2 are described"),
        ("regions-short-by-one", long(RUNS + 8, (4 << 20) - 1), "which has 4194303 bytes"),
        ("regions-of-most-bytes", long(RUNS + 8, u64::MAX), "64 bits|layout takes"),
    ]
}

fn splice(bytes: &mut Vec<u8>, at: usize, count: usize, with: &[u8]) {
    bytes.splice(at..at + count, with.iter().copied());
}

#[test]
fn the_corpus_is_refused() {
    refuse("layouts", &[handmade(), handmade_geometries()].concat(), read);
}

/// A description that ends early is refused at every byte, with a new checksum too.
#[test]
fn what_is_cut_off_anywhere_is_refused() {
    for layout in [layout(), describe(&several_sections(3, 2), StorageKind::Disk)] {
        let sent = layout.encode().unwrap();
        for length in 0..sent.len() {
            assert!(read(&sent[..length]).is_err(), "{length}");
        }
        let inside = payload(&sent);
        for length in 0..inside.len() {
            assert!(read(&layout_frame(&inside[..length])).is_err(), "{length}");
        }
        let encoded = layout.geometry().encode();
        for length in 0..encoded.len() {
            assert!(read(&framed_geometry(&encoded[..length])).is_err(), "{length}");
        }
    }
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
        sections: 2,
        regions: 2,
        backends: 2,
    };
    assert!(LayoutDescriptor::decode(&bytes, &generous).is_ok());
    let cases = [
        (WireLimits { bytes: ByteCount::new(length.get() - 1), ..generous }, Limited::Bytes),
        (WireLimits { metadata: ByteCount::new(2), ..generous }, Limited::Metadata),
        (WireLimits { name: ByteCount::new(8), ..generous }, Limited::Name),
        (WireLimits { blocks: 63, ..generous }, Limited::Blocks),
        (WireLimits { sections: 1, ..generous }, Limited::Sections),
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

/// Values that cannot be decoded cannot be created either.
#[test]
fn descriptions_are_checked_where_they_are_made() {
    let good = layout();
    let length = good.geometry().region_bytes(0);
    let make = |storage, agent: &str, regions: Vec<RegionDescriptor>| {
        LayoutDescriptor::new(good.geometry().clone(), storage, agent.into(), vec![], regions)
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
        (
            system,
            "a",
            vec![host(4096), RegionDescriptor::new(RemoteSpace::Host, next, ByteCount::new(1), [])],
            "region 1 has 1 bytes, and the geometry requires 4194304",
        ),
        (system, "", vec![host(4096), host(next)], "\"\" is not a valid name (the agent's name)"),
        (system, "a\u{7}", vec![host(4096), host(next)], "is not a valid name"),
        (system, "a", vec![host(next - 1), host(4096)], "regions 0 and 1 overlap"),
        (system, "a", vec![host(4096), host(4096)], "regions 0 and 1 overlap"),
        (system, "a", vec![host(4096), host(u64::MAX)], "region 1 exceeds its address space"),
        (
            system,
            "a",
            vec![host(4096), at(RemoteSpace::File(1), next)],
            "region 1 is in file 1 space, but the layout is in system memory",
        ),
        (
            StorageKind::Disk,
            "a",
            vec![at(RemoteSpace::File(1), 0), at(RemoteSpace::File(1), i64::MAX.unsigned_abs())],
            "region 1 exceeds its address space",
        ),
        (
            StorageKind::Remote(terrane_core::PeerId::next()),
            "a",
            vec![host(4096), host(next)],
            "memory cannot be described",
        ),
    ] {
        let error = make(storage, agent, regions).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // The same positions of two files, or up to the last address, do not overlap.
    let files = vec![at(RemoteSpace::File(1), 0), at(RemoteSpace::File(2), 0)];
    assert_eq!(make(StorageKind::Disk, "a", files), Ok(()));
    let last = u64::MAX - length.get();
    assert_eq!(make(system, "a", vec![host(last), host(4096)]), Ok(()));
}
