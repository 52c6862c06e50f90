//! Layouts over memory that the builder allocates.

use std::error::Error;

use terrane_core::{Alignment, ByteCount, Memory};
use terrane_layout::{
    BlockDimension, LayoutBuilder, LayoutError, LayoutKind, Part, RegistrationState,
};

use crate::doubles::{Allocator, Journal, Registrar, aligned, at_most, config};

#[test]
fn one_allocation_is_registered_once_and_cut_by_layer() {
    let journal = Journal::default();
    let (allocator, registrar) = (Allocator::new(&journal), Registrar::new(&journal));
    let layout = LayoutBuilder::new(config())
        .layer_separate(BlockDimension::Second)
        .allocate(&allocator)
        .register(&registrar)
        .build()
        .unwrap();
    assert_eq!(journal.entries(), ["allocate", "register 0"]);
    // Three regions of 960 bytes at multiples of 512.
    assert_eq!(allocator.latest.get(), Some(ByteCount::new(2 * 1024 + 960)));
    let offsets: Vec<u64> = layout.regions().iter().map(|region| region.offset().get()).collect();
    assert_eq!(offsets, [0, 1024, 2048]);
    assert!(layout.regions().iter().all(|r| r.length() == ByteCount::new(960)));

    let registrations = layout.registrations();
    assert_eq!(registrations.len(), 1);
    assert_eq!((registrations[0].first_region, registrations[0].last_region), (0, 2));
    assert_eq!(registrations[0].record.span.length, ByteCount::new(2 * 1024 + 960));
    assert_eq!(layout.registration_state().agent(), Some(&registrar.agent));
    assert_eq!(layout.capabilities().outcomes().len(), 1);
    assert_eq!(layout.verify().unwrap().pieces, 30);
    assert_eq!(layout.padding().region_padding, ByteCount::new(2 * 64));

    drop(layout);
    assert_eq!(journal.entries()[2..], ["deregister 0", "release base"]);
}

#[test]
fn regions_taken_out_keep_memory_and_registration() {
    let journal = Journal::default();
    let (allocator, registrar) = (Allocator::new(&journal), Registrar::new(&journal));
    let layout = LayoutBuilder::new(config())
        .layer_separate(BlockDimension::First)
        .allocate(&allocator)
        .register(&registrar)
        .build()
        .unwrap();
    let mut regions = layout.into_regions();
    let last = regions.pop();
    drop(regions);
    assert_eq!(journal.entries(), ["allocate", "register 0"]);
    drop(last);
    assert_eq!(journal.entries()[2..], ["deregister 0", "release base"]);
}

#[test]
fn limits_of_allocator_and_registrar_are_read_before_planning() {
    let journal = Journal::default();
    let allocator = Allocator { limits: aligned(2048), ..Allocator::new(&journal) };
    let registrar = Registrar { limits: aligned(4096), ..Registrar::new(&journal) };
    let layout = LayoutBuilder::new(config())
        .layer_separate(BlockDimension::First)
        .allocate(&allocator)
        .register(&registrar)
        .build()
        .unwrap();
    let offsets: Vec<u64> = layout.regions().iter().map(|region| region.offset().get()).collect();
    assert_eq!(offsets, [0, 4096, 8192]);
}

#[test]
fn nothing_is_allocated_for_invalid_plans() {
    let journal = Journal::default();
    let unlimited = || Allocator::new(&journal);
    let plain = Registrar::new(&journal);
    let narrow = Registrar { limits: at_most(100), ..Registrar::new(&journal) };

    let small = Allocator { limits: at_most(100), ..unlimited() };
    let region_too_large = LayoutBuilder::new(config())
        .layer_separate(BlockDimension::First)
        .allocate(&small)
        .register(&plain)
        .build()
        .unwrap_err();
    assert!(matches!(region_too_large, LayoutError::RegionTooLarge { part: Part::Region(0), .. }));

    // Each region fits, but all of them together do not.
    let medium = Allocator { limits: at_most(1000), ..unlimited() };
    let base_too_large = LayoutBuilder::new(config())
        .layer_separate(BlockDimension::First)
        .allocate(&medium)
        .unregistered()
        .build()
        .unwrap_err();
    assert!(matches!(base_too_large, LayoutError::RegionTooLarge { part: Part::Base, .. }));

    let of_registrar = LayoutBuilder::new(config())
        .fully_contiguous()
        .allocate(&unlimited())
        .register(&narrow)
        .build()
        .map(|_| ());
    assert!(matches!(of_registrar, Err(LayoutError::RegionTooLarge { .. })));

    let huge = config().with_block_alignment(Alignment::new(1 << 62).unwrap()).unwrap();
    for kind in LayoutKind::ALL {
        let allocator = unlimited();
        let overflow = LayoutBuilder::new(huge).kind(kind).allocate(&allocator).unregistered();
        assert!(overflow.build().is_err(), "{kind}");
    }
    assert!(journal.entries().is_empty(), "{:?}", journal.entries());
}

#[test]
fn a_refused_allocation_keeps_its_cause() {
    let journal = Journal::default();
    let allocator = Allocator { refuses: true, ..Allocator::new(&journal) };
    let registrar = Registrar::new(&journal);
    let error = LayoutBuilder::new(config())
        .fully_contiguous()
        .allocate(&allocator)
        .register(&registrar)
        .build()
        .unwrap_err();
    assert_eq!(journal.entries(), ["allocate"]);
    assert!(error.source().unwrap().to_string().contains("KV blocks, fully contiguous"));
}

#[test]
fn a_refused_registration_releases_the_memory_if_it_is_required() {
    let journal = Journal::default();
    let (allocator, registrar) = (Allocator::new(&journal), Registrar::refusing(&journal, 0));
    let error = LayoutBuilder::new(config())
        .fully_contiguous()
        .allocate(&allocator)
        .register(&registrar)
        .build()
        .unwrap_err();
    assert_eq!(journal.entries(), ["allocate", "refuse 0", "release base"]);
    assert!(matches!(error, LayoutError::Register { part: Part::Base, .. }));
    assert!(error.source().unwrap().to_string().contains("no backend of agent agent"));
}

#[test]
fn a_refused_optional_registration_is_reported() {
    let journal = Journal::default();
    let (allocator, registrar) = (Allocator::new(&journal), Registrar::refusing(&journal, 0));
    let layout = LayoutBuilder::new(config())
        .fully_contiguous()
        .allocate(&allocator)
        .register_if_supported(&registrar)
        .build()
        .unwrap();
    let RegistrationState::Refused { agent, cause } = layout.registration_state() else {
        panic!("{:?}", layout.registration_state())
    };
    assert_eq!(*agent, registrar.agent);
    assert!(matches!(**cause, LayoutError::Register { part: Part::Base, .. }));
    assert!(layout.registrations().is_empty());
    drop(layout);
    assert_eq!(journal.entries(), ["allocate", "refuse 0", "release base"]);
}

#[test]
fn an_optional_registrar_with_too_small_limits_is_not_called() {
    let journal = Journal::default();
    let allocator = Allocator::new(&journal);
    let registrar = Registrar { limits: at_most(100), ..Registrar::new(&journal) };
    let layout = LayoutBuilder::new(config())
        .fully_contiguous()
        .allocate(&allocator)
        .register_if_supported(&registrar)
        .build()
        .unwrap();
    let RegistrationState::Refused { cause, .. } = layout.registration_state() else {
        panic!("{:?}", layout.registration_state())
    };
    assert!(matches!(**cause, LayoutError::RegionTooLarge { .. }));
    assert_eq!(journal.entries(), ["allocate"]);
}

#[test]
fn unregistered_calls_no_registrar() {
    let journal = Journal::default();
    let allocator = Allocator::new(&journal);
    let builder = LayoutBuilder::new(config()).fully_contiguous().allocate(&allocator);
    let layout = builder.unregistered().build().unwrap();
    assert!(matches!(layout.registration_state(), RegistrationState::Unregistered));
    drop(layout);
    assert_eq!(journal.entries(), ["allocate", "release base"]);
}

#[test]
fn an_allocator_that_breaks_its_contract_is_found_out_before_registration() {
    for (short_by, address, expected) in [
        (1, 1 << 30, "has 2879 bytes, and 2880 are needed"),
        (0, (1 << 30) + 64, "needs an alignment of"),
    ] {
        let journal = Journal::default();
        let allocator = Allocator { short_by, address, ..Allocator::new(&journal) };
        let registrar = Registrar::new(&journal);
        let error = LayoutBuilder::new(config())
            .fully_contiguous()
            .allocate(&allocator)
            .register(&registrar)
            .build()
            .unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
        assert_eq!(journal.entries(), ["allocate", "release base"]);
    }
}
