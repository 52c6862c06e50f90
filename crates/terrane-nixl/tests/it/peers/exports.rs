//! Exports: which layouts can be exported, and the contents.

use terrane_core::{
    Allocate, BackendOutcome, ByteCount, ForeignMemory, Memory, Region, RegionRequest, Register,
    RegistrationRecord, RemoteSpace, Span, StorageKind,
};
use terrane_layout::{BlockDimension, LayoutBuilder, LayoutKind, LayoutPlan};
use terrane_nixl::ExportError;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::memory::HeapAllocator;

use super::support::*;

#[test]
fn an_export_describes_the_layout_and_its_location() {
    let agent = agent();
    for kind in LayoutKind::ALL {
        let layout = layout(&agent, kind);
        let described = decoded(&agent.export(&layout).unwrap());
        assert_eq!(described.geometry(), layout.geometry());
        assert_eq!(described.fingerprint(), layout.fingerprint());
        assert_eq!((described.agent(), described.storage()), (agent.name(), StorageKind::System));
        assert_eq!(described.regions().len(), layout.regions().len());
        for (described, region) in described.regions().iter().zip(layout.regions()) {
            let address = region.location().as_host().unwrap().get();
            assert_eq!((described.space(), described.address()), (RemoteSpace::Host, address));
            assert_eq!(described.length(), layout.geometry().region_bytes(0));
            assert_eq!(described.backends(), ["UCX".into()]);
        }
        assert!(!described.metadata().is_empty());
    }
}

/// Regions that are registered one by one, and longer than the layout needs.
#[test]
fn exports_of_adopted_regions_offer_only_the_bytes_of_the_layout() {
    let agent = agent();
    let kind = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    let plan = LayoutPlan::new(&config(), kind, Default::default()).unwrap();
    let allocator = HeapAllocator::system();
    let regions: Vec<Region> = plan
        .requests()
        .map(|request| {
            let bytes = request.bytes.checked_add(ByteCount::kib(4)).unwrap();
            let memory = allocator.allocate(&RegionRequest { bytes, ..request }).unwrap();
            Region::new(agent.register(memory).unwrap())
        })
        .collect();
    let builder = LayoutBuilder::new(config()).kind(kind);
    let layout = builder.adopt_registered(agent.name().clone(), regions).build().unwrap();
    let described = agent.describe(&layout).unwrap();
    assert_eq!(described.regions().len(), 4);
    for region in described.regions() {
        assert_eq!(region.length(), plan.geometry().region_bytes(0));
    }
    // A peer imports it with the four keys of the export.
    let peer = super::support::agent();
    assert!(peer.import(&described.encode().unwrap()).is_ok());
}

#[test]
fn unregistered_layouts_are_not_exported() {
    let (agent, other) = (agent(), agent());
    let builder = LayoutBuilder::new(config()).kind(CONTIGUOUS);
    let unregistered = builder.allocate(&HeapAllocator::system()).unregistered().build().unwrap();
    match agent.export(&unregistered) {
        Err(ExportError::NotRegistered { region: 0, found, .. }) => assert!(found.is_empty()),
        other => panic!("{other:?}"),
    }
    let of_other = layout(&other, CONTIGUOUS);
    let error = agent.export(&of_other).unwrap_err();
    assert!(error.to_string().contains(other.name().as_str()), "{error}");
    match error {
        ExportError::NotRegistered { found, .. } => assert_eq!(found, [other.name().clone()]),
        other => panic!("{other:?}"),
    }
}

/// Memory whose owner claims that it is registered, wholly or in part.
fn claimed(agent: &terrane_nixl::Agent, part: u64) -> terrane_layout::PhysicalLayout {
    let plan = LayoutPlan::new(&config(), CONTIGUOUS, Default::default()).unwrap();
    let memory = HeapAllocator::system().allocate(&plan.base_request()).unwrap();
    let span = Span::of(&memory);
    let record = RegistrationRecord {
        agent: agent.name().clone(),
        span: Span { length: ByteCount::new(span.length.get() / part), ..span },
        backends: vec![BackendOutcome { backend: "UCX".into(), refusal: None }],
    };
    // SAFETY: the owner is the memory, and the span is its own.
    let memory = unsafe { ForeignMemory::new(span, memory) };
    // SAFETY: the claim of a registration is false, which the test needs. No peer accesses the
    // memory.
    let memory = unsafe { memory.with_registration(record) };
    let builder = LayoutBuilder::new(config()).kind(CONTIGUOUS);
    builder.adopt_memory([memory]).unregistered().build().unwrap()
}

#[test]
fn a_registration_of_a_part_is_insufficient() {
    let agent = agent();
    let error = agent.export(&claimed(&agent, 2)).unwrap_err();
    assert!(matches!(error, ExportError::NotCovered { region: 0, .. }), "{error}");
}

#[test]
fn an_ended_registration_is_detected() {
    let agent = agent();
    let error = agent.export(&claimed(&agent, 1)).unwrap_err();
    assert!(matches!(error, ExportError::RegistrationGone { region: 0, .. }), "{error}");
    // Also if the agent has registered other memory.
    let _other = layout(&agent, CONTIGUOUS);
    let error = agent.export(&claimed(&agent, 1)).unwrap_err();
    assert!(matches!(error, ExportError::Metadata { .. }), "{error}");
}

#[test]
fn unreachable_memory_is_not_exported() {
    // POSIX supports host memory and files, and cannot reach peers.
    let agent = agent_with("POSIX");
    let error = agent.export(&layout(&agent, CONTIGUOUS)).unwrap_err();
    assert!(matches!(error, ExportError::NoBackend { .. }), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let disk = DiskAllocator::new(folder.path(), DiskOptions::default()).unwrap();
    let builder = LayoutBuilder::new(config()).kind(CONTIGUOUS);
    let on_disk = builder.allocate(&disk).register(&agent).build().unwrap();
    match agent.export(&on_disk).unwrap_err() {
        ExportError::NoBackend { storage, .. } => assert_eq!(storage, StorageKind::Disk),
        other => panic!("{other}"),
    }
}

#[test]
fn only_the_owner_exports_its_memory() {
    let (owner, reader) = (agent(), agent());
    let layout = layout(&owner, CONTIGUOUS);
    let remote = reader.import(&owner.export(&layout).unwrap()).unwrap();
    let error = reader.export(remote.endpoint().layout()).unwrap_err();
    assert!(matches!(error, ExportError::NotOurs { .. }), "{error}");
}

/// A view knows its agent and its location.
#[test]
fn views_are_described_by_the_agent_that_registered_them() {
    let agent = agent();
    let layout = layout(&agent, CONTIGUOUS);
    let [region] = layout.regions() else { panic!("one region") };
    let view = region.view(ByteCount::new(100), ByteCount::new(50)).unwrap();
    let described = agent.describe_memory(&view).unwrap();
    let address = region.location().as_host().unwrap().get() + 100;
    assert_eq!((described.space(), described.address()), (RemoteSpace::Host, address));
    assert_eq!(
        (described.length(), described.backends()),
        (ByteCount::new(50), &["UCX".into()][..])
    );
    assert!(matches!(
        super::support::agent().describe_memory(&view),
        Err(ExportError::NotRegistered { .. })
    ));
}
