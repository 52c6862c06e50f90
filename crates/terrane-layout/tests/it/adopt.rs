//! Layouts over the caller's memory.

use std::error::Error;

use terrane_core::{AgentName, Alignment, ByteCount, Memory, Region, Register, Span};
use terrane_layout::{
    BlockDimension, BuildFailed, LayoutBuilder, LayoutError, Part, RegistrationState,
};

use crate::doubles::{
    Journal, NumberedMemory, Registrar, aligned, at_most, config, device_span, file_span,
};

/// The bytes of a layer of `config`.
const BYTES: u64 = 960;

fn regions(journal: &Journal, spans: impl IntoIterator<Item = Span>) -> Vec<Region> {
    (0..)
        .zip(spans)
        .map(|(n, span): (u32, _)| Region::new(NumberedMemory::new(span, journal, &n.to_string())))
        .collect()
}

/// Three regions, not in the order of their addresses.
fn three(journal: &Journal) -> Vec<Region> {
    regions(journal, [20_000, 0, 10_000].map(|address| device_span(address, BYTES)))
}

fn adopt(regions: Vec<Region>) -> Result<terrane_layout::PhysicalLayout, BuildFailed> {
    let builder = LayoutBuilder::new(config()).layer_separate(BlockDimension::First);
    builder.adopt(regions).unregistered().build()
}

#[test]
fn foreign_memory_becomes_a_layout_and_comes_out_again() {
    let journal = Journal::default();
    let given = three(&journal);
    let spans: Vec<Span> = given.iter().map(Region::span).collect();
    let layout = adopt(given).unwrap();
    assert_eq!(layout.verify().unwrap().pieces, 30);
    assert_eq!(layout.device_address(4, 2, 1).unwrap().get(), 10_000 + BYTES - 96);
    assert_eq!(layout.alignment_class(), Alignment::new(16).unwrap());

    let regions = layout.into_regions();
    assert_eq!(regions.iter().map(Region::span).collect::<Vec<_>>(), spans);
    assert!(journal.entries().is_empty());
    drop(regions);
    assert_eq!(journal.entries(), ["release 0", "release 1", "release 2"]);
}

#[test]
fn memory_that_is_no_region_yet() {
    let journal = Journal::default();
    let memory = NumberedMemory::new(device_span(0, 3 * BYTES + 5), &journal, "whole");
    let layout = LayoutBuilder::new(config())
        .fully_contiguous()
        .adopt_memory([memory])
        .unregistered()
        .build()
        .unwrap();
    assert_eq!(layout.padding().region_padding, ByteCount::new(5));
    drop(layout);
    assert_eq!(journal.entries(), ["release whole"]);
}

#[test]
fn every_check_gives_the_regions_back() {
    let at = |address, length| device_span(address, length);
    let cases: [(Vec<Span>, &str); 6] = [
        (vec![], "3 regions, and 0 were passed"),
        (vec![at(0, BYTES), at(1000, BYTES)], "pass one for each layer"),
        (vec![at(0, BYTES), at(1000, BYTES - 1), at(2000, BYTES)], "region 1 has 959 bytes"),
        (vec![at(0, BYTES), at(1000, BYTES), file_span(0, BYTES)], "region 2 is disk memory"),
        (vec![at(0, BYTES), at(2000, BYTES), at(BYTES - 1, BYTES)], "regions 0 and 2 overlap"),
        (vec![at(u64::MAX - 10, BYTES), at(0, BYTES), at(1000, BYTES)], "address space"),
    ];
    for (spans, expected) in cases {
        let journal = Journal::default();
        let failed = adopt(regions(&journal, spans.clone())).unwrap_err();
        assert!(failed.to_string().contains(expected), "{failed}");
        assert_eq!(failed.regions.iter().map(Region::span).collect::<Vec<_>>(), spans);
        assert!(journal.entries().is_empty());
    }
}

#[test]
fn bytes_beyond_those_needed_may_be_shared() {
    let journal = Journal::default();
    let layout =
        adopt(regions(&journal, [0, 1000, 2000].map(|address| device_span(address, 5000))));
    assert_eq!(layout.unwrap().verify().unwrap().pieces, 30);
}

#[test]
fn alignment_is_what_the_blocks_and_the_registrar_demand() {
    let build = |config, address: u64, limits| {
        let journal = Journal::default();
        let registrar = Registrar { limits, ..Registrar::new(&journal) };
        let spans = [device_span(address, 1 << 20)];
        let builder = LayoutBuilder::new(config).fully_contiguous();
        let result =
            builder.adopt(regions(&journal, spans)).register(&registrar).build().map(|_| ());
        (result.map_err(|failed| failed.cause), journal.entries())
    };
    let page = config().with_block_alignment(Alignment::PAGE).unwrap();
    assert!(build(config(), 3, aligned(1)).0.is_ok());
    assert!(build(page, 8192, aligned(1)).0.is_ok());
    for refused in [build(page, 512, aligned(1)), build(config(), 512, aligned(1024))] {
        let (Err(LayoutError::RegionMisaligned { part: Part::Region(0), .. }), journal) = refused
        else {
            panic!("{refused:?}")
        };
        assert_eq!(journal, ["release 0"]);
    }
    // The layout fits the memory's limits, but not the registrar's.
    let (result, _) = build(config(), 0, at_most(1 << 19));
    assert!(matches!(result, Err(LayoutError::RegionTooLarge { .. })), "{result:?}");
}

#[test]
fn each_region_is_registered_and_deregistered_before_its_release() {
    let journal = Journal::default();
    let registrar = Registrar::new(&journal);
    let builder = LayoutBuilder::new(config()).layer_separate(BlockDimension::First);
    let layout = builder.adopt(three(&journal)).register(&registrar).build().unwrap();
    let registrations = layout.registrations();
    assert_eq!(registrations.len(), 3);
    for (number, found) in (0..).zip(&registrations) {
        assert_eq!((found.first_region, found.last_region), (number, number));
    }
    drop(layout);
    assert_eq!(
        journal.entries(),
        [
            "register 0",
            "register 1",
            "register 2",
            "deregister 0",
            "release 0",
            "deregister 1",
            "release 1",
            "deregister 2",
            "release 2"
        ]
    );
}

#[test]
fn a_refusal_undoes_the_registrations_before_it() {
    let journal = Journal::default();
    let registrar = Registrar::refusing(&journal, 2);
    let builder = LayoutBuilder::new(config()).layer_separate(BlockDimension::First);
    let failed = builder.adopt(three(&journal)).register(&registrar).build().unwrap_err();
    let undone = ["register 0", "register 1", "refuse 2", "deregister 1", "deregister 0"];
    assert_eq!(journal.entries(), undone);
    assert!(matches!(failed.cause, LayoutError::Register { part: Part::Region(2), .. }));
    assert!(failed.source().unwrap().to_string().contains("no backend"));
    assert_eq!(failed.regions.len(), 3);
    for region in &failed.regions {
        region.visit_registrations(&mut |record| panic!("{record:?} is left"));
    }
    drop(failed);
    assert_eq!(journal.entries()[5..], ["release 0", "release 1", "release 2"]);
}

#[test]
fn a_refusal_that_is_dispensable_leaves_no_region_registered() {
    let journal = Journal::default();
    let registrar = Registrar::refusing(&journal, 1);
    let builder = LayoutBuilder::new(config()).layer_separate(BlockDimension::First);
    let layout = builder.adopt(three(&journal)).register_if_supported(&registrar).build().unwrap();
    assert_eq!(journal.entries(), ["register 0", "refuse 1", "deregister 0"]);
    let RegistrationState::Refused { cause, .. } = layout.registration_state() else {
        panic!("{:?}", layout.registration_state())
    };
    assert!(matches!(**cause, LayoutError::Register { part: Part::Region(1), .. }));
    assert!(layout.registrations().is_empty());
}

#[test]
fn registered_regions_have_to_be_the_agents() {
    let journal = Journal::default();
    let ours = Registrar::new(&journal);
    let theirs = Registrar { agent: "other".into(), ..Registrar::new(&journal) };
    let registered = |registrars: [Option<&Registrar>; 3]| -> Vec<Region> {
        three(&journal)
            .into_iter()
            .zip(registrars)
            .map(|(region, registrar)| match registrar {
                Some(registrar) => Region::new(registrar.register(region).unwrap()),
                None => region,
            })
            .collect()
    };
    let build = |regions| {
        let builder = LayoutBuilder::new(config()).layer_separate(BlockDimension::First);
        builder.adopt_registered(AgentName::from("agent"), regions).build()
    };

    let layout = build(registered([Some(&ours); 3])).unwrap();
    assert!(matches!(layout.registration_state(), RegistrationState::Adopted { .. }));
    assert_eq!(layout.registrations().len(), 3);

    let failed = build(registered([Some(&ours), Some(&theirs), None])).unwrap_err();
    assert_eq!(
        failed.to_string(),
        "region 1 is not registered with agent agent, but with other; register it with that agent, \
         or adopt it unregistered"
    );
    assert_eq!(failed.regions.len(), 3);
    let failed = build(registered([Some(&ours), Some(&ours), None])).unwrap_err();
    assert!(
        failed
            .to_string()
            .contains("region 2 is not registered with agent agent, but with no agent")
    );
}

#[test]
fn a_registration_of_other_bytes_does_not_count() {
    use terrane_core::{ForeignMemory, RegistrationRecord};
    let (agent, length) = (AgentName::from("agent"), 3 * BYTES);
    let adopt = |registered: Span| {
        let record =
            RegistrationRecord { agent: agent.clone(), span: registered, backends: vec![] };
        // SAFETY: no test reads or writes the span.
        let memory = unsafe { ForeignMemory::new(device_span(4096, length), ()) };
        // SAFETY: nothing is ever transferred.
        let memory = unsafe { memory.with_registration(record) };
        let builder = LayoutBuilder::new(config()).fully_contiguous();
        builder.adopt_registered(agent.clone(), [Region::new(memory)]).build().map(|_| ())
    };
    assert!(adopt(device_span(4096, length)).is_ok());
    assert!(adopt(device_span(0, length + 4096)).is_ok());
    for elsewhere in [
        device_span(4097, length),
        device_span(4096, length - 1),
        device_span(0, 4096),
        file_span(4096, length),
    ] {
        let failed = adopt(elsewhere).unwrap_err();
        assert!(matches!(failed.cause, LayoutError::NotCovered { region: 0, .. }), "{failed}");
    }
}
