//! Requirements of registrations, and their records.

use terrane_core::{
    Alignment, Allocate, BackendOutcome, ByteCount, ForeignMemory, Limits, Memory, Region,
    RegionRequest, Register, RegisterError, Span, StorageKind,
};
use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig, LayoutError, RegistrationState};
use terrane_nixl::{BackendConfig, BackendRequirement, FileAccess, MemoryType, Refusal, Status};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::memory::HeapAllocator;

use crate::support::{agent, memory, posix};

fn file(directory: &tempfile::TempDir, options: DiskOptions) -> impl Memory + use<> {
    let allocator = DiskAllocator::new(directory.path(), options).unwrap();
    allocator.allocate(&RegionRequest::new(ByteCount::kib(64))).unwrap()
}

/// Memory that claims to be on a device that no backend knows.
fn device() -> impl Memory {
    let request = RegionRequest::new(ByteCount::kib(64));
    HeapAllocator::simulated_device(0).allocate(&request).unwrap()
}

fn refusal(outcome: &BackendOutcome) -> Option<Refusal> {
    outcome.refusal.as_ref().map(|why| *why.downcast_ref::<Refusal>().unwrap())
}

#[test]
fn the_record_lists_the_backends_that_accepted_and_the_refusals() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent([BackendConfig::new("UCX"), posix()]);
    let registered = agent.register(file(&directory, DiskOptions::default())).unwrap();
    let record = registered.record();
    let outcomes: Vec<_> =
        record.backends.iter().map(|o| (o.backend.as_str(), refusal(o))).collect();
    let not_files = Refusal::MemoryType { memory: MemoryType::File };
    assert_eq!(outcomes, [("UCX", Some(not_files)), ("POSIX", None)]);
    assert!(record.accepted_by(&"POSIX".into()) && !record.accepted_by(&"UCX".into()));
}

#[test]
fn a_required_backend_that_refuses_undoes_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent([posix(), BackendConfig::new("UCX").required()]);
    let memory = Region::new(file(&directory, DiskOptions::default()));
    let failed = agent.register(memory.clone()).unwrap_err();
    assert!(failed.memory.same_memory(&memory), "the memory is returned");
    let RegisterError::RequiredBackend { backend, source, .. } = &failed.cause else {
        panic!("{}", failed.cause)
    };
    assert_eq!(backend.as_str(), "UCX");
    let refusal = source.downcast_ref::<Refusal>().unwrap();
    assert_eq!(*refusal, Refusal::MemoryType { memory: MemoryType::File });

    // Another registrar of the same agent requires less.
    let registrar = agent.registrar([("POSIX", BackendRequirement::Required)]).unwrap();
    let registered = registrar.register(memory).unwrap();
    assert_eq!(registered.record().backends.len(), 1);
    assert_eq!(Register::agent(&registrar), agent.name());
}

#[test]
fn memory_that_every_backend_refuses_is_returned_with_all_reasons() {
    let agent = agent([BackendConfig::new("UCX"), posix()]);
    let failed = agent.register(device()).unwrap_err();
    let RegisterError::Refused { backends, span, .. } = &failed.cause else {
        panic!("{}", failed.cause)
    };
    assert_eq!(*span, Span::of(&failed.memory));
    let reasons: Vec<_> = backends.iter().map(refusal).collect();
    let not_devices = Refusal::MemoryType { memory: MemoryType::Device };
    assert_eq!(reasons[1], Some(not_devices));
    // UCX supports device memory, and finds none at that address. Without a driver, the refusal names
    // the module that it could not load.
    let text = failed.cause.to_string();
    match reasons[0] {
        Some(Refusal::Status(Status::Backend)) => {}
        Some(Refusal::UcxModule { status: Status::Backend, module, .. }) => {
            assert!(text.contains(module) && text.contains("libcuda.so.1"), "{text}");
        }
        other => panic!("{other:?}"),
    }
    assert!(text.contains("UCX") && text.contains("POSIX"), "{text}");
}

#[test]
fn memory_of_a_kind_that_no_backend_supports_is_unsupported() {
    let registrars = [agent([posix()]), agent([])];
    for registrar in registrars {
        let failed = registrar.register(device()).unwrap_err();
        let RegisterError::UnsupportedKind { agent, kind } = &failed.cause else {
            panic!("{}", failed.cause)
        };
        assert_eq!((agent, *kind), (registrar.name(), Memory::kind(&failed.memory)));
    }
}

#[test]
fn an_empty_span_is_refused() {
    let agent = agent([posix()]);
    let span = Span { length: ByteCount::ZERO, ..Span::of(&memory(ByteCount::new(64))) };
    // SAFETY: a span of no bytes.
    let empty = unsafe { ForeignMemory::new(span, ()) };
    let failed = agent.register(empty).unwrap_err();
    let RegisterError::Refused { backends, .. } = &failed.cause else { panic!("{}", failed.cause) };
    assert_eq!(refusal(&backends[0]), Some(Refusal::Empty));
}

#[test]
fn a_backend_with_direct_io_needs_a_file_with_a_direct_descriptor() {
    let directory = tempfile::tempdir().unwrap();
    let agent = agent([posix().file_access(FileAccess::Direct)]);
    let options = DiskOptions { direct: terrane_core::Requirement::Off, ..DiskOptions::default() };
    let failed = agent.register(file(&directory, options)).unwrap_err();
    let RegisterError::Refused { backends, .. } = &failed.cause else { panic!("{}", failed.cause) };
    assert_eq!(refusal(&backends[0]), Some(Refusal::NoDirectDescriptor));
    assert!(failed.cause.to_string().contains("direct I/O"), "{}", failed.cause);
}

#[test]
fn limits_are_those_of_the_selected_backends() {
    let both = agent([BackendConfig::new("UCX"), posix().file_access(FileAccess::Direct)]);
    let pages = Limits { alignment: Alignment::PAGE, granule: Alignment::PAGE, ..Limits::NONE };
    assert_eq!(both.limits(), pages);
    let ucx = both.registrar([("UCX", BackendRequirement::IfSupported)]).unwrap();
    assert_eq!(ucx.limits(), Limits::NONE);
    assert_eq!(agent([posix()]).limits(), Limits::NONE);
}

fn config() -> LayoutConfig {
    LayoutConfig::builder()
        .num_blocks(4)
        .num_layers(2)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(64)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap()
}

#[test]
fn a_layout_is_one_registration_whose_views_are_covered() {
    let agent = agent([BackendConfig::new("UCX"), posix()]);
    let layout = LayoutBuilder::new(config())
        .layer_separate(terrane_layout::BlockDimension::First)
        .allocate(&HeapAllocator::system())
        .register(&agent)
        .build()
        .unwrap();
    let registrations = layout.registrations();
    assert_eq!(registrations.len(), 1);
    for region in layout.regions() {
        let mut records = Vec::new();
        region.visit_registrations(&mut |record| records.push(record.clone()));
        assert_eq!(records.len(), 1);
        assert_eq!(records[0].agent, *agent.name());
        assert_eq!(records[0].span.kind, StorageKind::System);
        assert!(records[0].span.covers(&region.span()));
        assert_eq!(records[0].accepted().count(), 2);
    }
}

#[test]
fn registered_regions_are_adopted_with_their_agent_only() {
    let (mine, yours) = (agent([posix()]), agent([posix()]));
    let region = || memory(ByteCount::kib(32)).into_region_of(&mine);
    let build = |agent: &terrane_nixl::Agent, regions| {
        let builder = LayoutBuilder::new(config()).fully_contiguous();
        builder.adopt_registered(agent.name().clone(), regions).build()
    };
    let layout = build(&mine, vec![region()]).unwrap();
    assert_eq!(layout.registrations()[0].record.agent, *mine.name());
    let failed = build(&yours, vec![region()]).unwrap_err();
    let LayoutError::NotRegistered { agent, found, .. } = &failed.cause else {
        panic!("{}", failed.cause)
    };
    assert_eq!((agent, found.as_slice()), (yours.name(), [mine.name().clone()].as_slice()));
    assert_eq!(failed.regions.len(), 1);
}

trait IntoRegion: Memory + Sized {
    fn into_region_of(self, agent: &terrane_nixl::Agent) -> Region {
        Region::new(agent.register(self).unwrap())
    }
}

impl<M: Memory> IntoRegion for M {}

#[test]
fn a_layout_that_no_backend_accepts_reports_the_refusals() {
    let agent = agent([posix()]);
    let layout = LayoutBuilder::new(config())
        .fully_contiguous()
        .allocate(&HeapAllocator::simulated_device(1))
        .register_if_supported(&agent)
        .build()
        .unwrap();
    let RegistrationState::Refused { cause, .. } = layout.registration_state() else {
        panic!("{:?}", layout.registration_state())
    };
    assert!(matches!(**cause, LayoutError::Register { .. }), "{cause}");
}
