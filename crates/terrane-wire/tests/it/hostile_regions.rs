//! Forged descriptions of single regions.

use proptest::prelude::*;
use terrane_core::{BackendName, ByteCount, DeviceId, RemoteSpace};
use terrane_testkit::damage::Damage;
use terrane_wire::{RegionDescriptor, WireError, WireLimits};

use crate::corpus::{Handmade, refuse};
use crate::frames::{frame, payload};

fn read(bytes: &[u8]) -> Result<RegionDescriptor, WireError> {
    RegionDescriptor::decode(bytes, &WireLimits::default())
}

fn framed(inside: &[u8]) -> Vec<u8> {
    frame(b"TerraneR", 1, inside)
}

/// Space, number, address (3 bytes), length (2), two names.
fn region() -> RegionDescriptor {
    let backends = ["POSIX", "UCX"].map(BackendName::from);
    RegionDescriptor::new(RemoteSpace::Host, 1 << 20, ByteCount::kib(4), backends)
}

const SPACE: usize = 0;
const NUMBER: usize = 1;
const NAMES: usize = 7;

proptest! {
    /// A forger computes the checksum too. The frame is refused, or it is the canonical encoding.
    #[test]
    fn what_is_inside_is_not_believed(
        space in prop::sample::select(vec![
            RemoteSpace::Host,
            RemoteSpace::Device(DeviceId::new(3)),
            RemoteSpace::File(u64::MAX),
        ]),
        address in 0_u64..1 << 50,
        length in 0_u64..1 << 50,
        damage in Damage::up_to(5),
    ) {
        let backends = ["GDS", "UCX"].map(BackendName::from);
        let sent = RegionDescriptor::new(space, address, ByteCount::new(length), backends);
        let mut inside = payload(&sent.encode().unwrap()).to_vec();
        damage.iter().for_each(|damage| damage.apply(&mut inside));
        let bytes = framed(&inside);
        match read(&bytes) {
            Ok(region) => prop_assert_eq!(region.encode().unwrap(), bytes),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

fn handmade() -> Vec<Handmade> {
    let sent = region().encode().unwrap();
    let inside = payload(&sent).to_vec();
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut inside = inside.clone();
        change(&mut inside);
        framed(&inside)
    };
    let most = [0xff, 0xff, 0xff, 0xff, 0x0f];
    vec![
        ("a-layout", frame(b"TerraneL", 1, &inside), "begins with \"TerraneL\""),
        (
            "version-2",
            frame(b"TerraneR", 2, &inside),
            "has version 2, and this library reads version 1",
        ),
        ("cut-in-payload", sent[..20].to_vec(), "pass all of it"),
        ("no-payload", framed(&[]), "region 0 at byte 16 cannot be decoded"),
        (
            "space-3",
            with(&|p| p[SPACE] = 3),
            "space has the unknown tag 3; the known tags are 0, 1, 2",
        ),
        ("number-of-host", with(&|p| p[NUMBER] = 1), "number of a host space is 1"),
        (
            "device-of-33-bits",
            with(&|p| {
                p[SPACE] = 1;
                p.splice(NUMBER..=NUMBER, [0x80, 0x80, 0x80, 0x80, 0x10]);
            }),
            "the device number is 4294967296",
        ),
        ("long-number", with(&|p| drop(p.splice(NUMBER..=NUMBER, [0x80, 0]))), "is not canonical"),
        (
            "most-names",
            with(&|p| drop(p.splice(NAMES..=NAMES, most))),
            "number of backends is 4294967295",
        ),
        ("names-unsorted", with(&|p| p[NAMES + 2] = b'Z'), "is not canonical"),
        ("name-with-newline", with(&|p| p[NAMES + 2] = b'\n'), "\"\\nOSIX\" is not a valid name"),
        ("name-no-text", with(&|p| p[NAMES + 2] = 0xff), "cannot be decoded"),
        ("trailing-inside", with(&|p| p.push(0)), "1 B follow the end"),
    ]
}

#[test]
fn the_corpus_is_refused() {
    let sent = region();
    assert_eq!(read(&sent.encode().unwrap()).unwrap(), sent);
    refuse("regions", &handmade(), read);
}
