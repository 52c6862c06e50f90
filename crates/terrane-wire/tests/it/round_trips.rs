//! Encodings can be decoded, and each value has one encoding.

use proptest::prelude::*;
use terrane_core::{BackendName, ByteCount, DeviceId, RemoteSpace};
use terrane_layout::{BlockDimension, LayoutFingerprint, LayoutKind};
use terrane_wire::{LayoutDescriptor, RegionDescriptor, WireLimits};

use crate::layouts::{
    STORAGE, any_layout, config, describe, geometry, several_sections, split_elements,
};

proptest! {
    #[test]
    fn layouts_come_back_as_they_were(layout in any_layout()) {
        let bytes = layout.encode().unwrap();
        let back = LayoutDescriptor::decode(&bytes, &WireLimits::default()).unwrap();
        prop_assert_eq!(&back, &layout);
        // One layout, one encoding.
        prop_assert_eq!(back.encode().unwrap(), bytes);
        prop_assert_eq!(layout.fingerprint(), LayoutFingerprint::new(layout.geometry()));
    }

    #[test]
    fn regions_come_back_as_they_were(
        space in prop_oneof![
            Just(RemoteSpace::Host),
            any::<u32>().prop_map(|device| RemoteSpace::Device(DeviceId::new(device))),
            any::<u64>().prop_map(RemoteSpace::File),
        ],
        address in 0..u64::MAX / 4,
        length in 0..u64::MAX / 4,
        names in prop::collection::vec("[A-Z_]{1,8}", 0..6),
    ) {
        let names = names.iter().map(|name| BackendName::from(name.as_str()));
        let region = RegionDescriptor::new(space, address, ByteCount::new(length), names);
        let bytes = region.encode().unwrap();
        let back = RegionDescriptor::decode(&bytes, &WireLimits::default()).unwrap();
        prop_assert_eq!(&back, &region);
        prop_assert_eq!(back.encode().unwrap(), bytes);
    }
}

#[test]
fn every_kind_in_every_storage() {
    let kinds = LayoutKind::ALL.map(|kind| geometry(&config(), kind));
    let others = [several_sections(10, 3), several_sections(1, 1), split_elements(4)];
    for geometry in kinds.into_iter().chain(others) {
        for storage in STORAGE {
            let layout = describe(&geometry, storage);
            let bytes = layout.encode().unwrap();
            let back = LayoutDescriptor::decode(&bytes, &WireLimits::default()).unwrap();
            assert_eq!(back, layout);
            assert_eq!((back.geometry(), back.storage()), (&geometry, storage));
            assert_eq!(back.agent().as_str(), "prefill-0");
            assert_eq!(back.metadata(), [1, 2, 3]);
        }
    }
}

#[test]
fn the_order_of_backends_carries_no_meaning() {
    let names = |names: &[&str]| names.iter().map(|&name| BackendName::from(name)).collect();
    let region = |set: Vec<BackendName>| {
        RegionDescriptor::new(RemoteSpace::Host, 4096, ByteCount::mib(1), set)
    };
    let (a, b) = (region(names(&["UCX", "GDS"])), region(names(&["GDS", "UCX", "GDS"])));
    assert_eq!(a, b);
    assert_eq!(a.encode().unwrap(), b.encode().unwrap());
    assert_eq!(a.backends(), names(&["GDS", "UCX"]).as_slice());
}

/// A layer a region, and a registration each, as adopted tensors have: what travels is small.
#[test]
fn eighty_layers_take_little() {
    let config = config().with_num_layers(80).unwrap();
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    let layout = describe(&geometry(&config, kind), STORAGE[2]);
    let bytes = layout.encode().unwrap();
    assert!(bytes.len() < 80 * 7 + 512, "{} bytes", bytes.len());
}
