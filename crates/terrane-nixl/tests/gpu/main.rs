//! Memory of a real device, registered with UCX and with GDS.
//!
//! Each test says what it needs, and `skipped: NAME: REASON` where that is not there.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test says what it expects by panicking"
)]

#[path = "../../../terrane-cuda/tests/gpu/needs.rs"]
#[allow(dead_code, reason = "the needs of other tests are there as well")]
mod needs;
#[path = "../common/processes.rs"]
mod processes;
mod transfers;

use std::error::Error;

use terrane_core::{
    Alignment, Allocate, ByteCount, DeviceId, Memory, Region, RegionRequest, Register,
    RegisterError, Registered, Span, StorageKind,
};
use terrane_cuda::{Context, DeviceAllocator, PinnedAllocator, PinnedOptions};
use terrane_layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_nixl::{
    Agent, AgentBuilder, BackendConfig, FileAccess, MemoryType, NixlError, Refusal,
};
use terrane_storage::{DiskFile, DiskOptions};

const MIB: ByteCount = ByteCount::mib(1);

/// A real device, or `None` after having said what is missing.
fn device(test: &str, ordinal: u32) -> Option<Context> {
    match Context::primary(DeviceId::new(ordinal)) {
        // A simulated driver is none that UCX could use.
        Ok(context) if context.device().name == "Terrane Simulated Device" => {
            eprintln!("skipped: {test}: a real device needed, this one is simulated");
            None
        }
        Ok(context) => Some(context),
        Err(error) => {
            eprintln!("skipped: {test}: {error}");
            None
        }
    }
}

/// An agent with UCX. On a machine with a device that fails only if something is broken.
fn ucx() -> Agent {
    AgentBuilder::unnamed().backend(BackendConfig::new("UCX").required()).build().unwrap()
}

/// An agent of this builder, which has GDS; or `None` after having said that cuFile does not work
/// here. Whatever else is in the way fails the test: a plugin that does not load, say, or a library.
#[track_caller]
fn with_gds(test: &str, builder: AgentBuilder) -> Option<Agent> {
    match builder.build() {
        Ok(agent) => Some(agent),
        // The plugin loads and knows its parameters; then it opens cuFile's driver, and nothing else.
        Err(error @ NixlError::Backend { .. }) => {
            eprintln!("skipped: {test}: cuFile's driver does not open: {}", chain(&error));
            None
        }
        Err(error) => panic!("{}", chain(&error)),
    }
}

fn gds(test: &str) -> Option<Agent> {
    with_gds(test, AgentBuilder::unnamed().backend(BackendConfig::new("GDS")))
}

/// Whether it is cuFile that refuses a file: it takes those of few file systems. No other reason is
/// the machine's.
fn is_refused_by_cufile(error: &(dyn Error + 'static)) -> bool {
    if let Some(refusal) = error.downcast_ref() {
        // The backend was asked, and refused.
        return matches!(refusal, Refusal::Status(_));
    }
    if let Some(RegisterError::Refused { backends, .. }) = error.downcast_ref() {
        let mut causes = backends.iter().filter_map(|outcome| outcome.refusal.as_ref());
        return causes.all(|cause| is_refused_by_cufile(&**cause));
    }
    error.source().is_some_and(is_refused_by_cufile)
}

/// An error with its causes, in one line.
fn chain(error: &dyn Error) -> String {
    let text = match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    };
    text.replace('\n', " ")
}

fn allocate<A: Allocate>(allocator: &A, bytes: ByteCount) -> A::Memory {
    allocator.allocate(&RegionRequest::new(bytes).aligned_to(Alignment::PAGE)).unwrap()
}

#[track_caller]
fn register<M: Memory>(agent: &Agent, memory: M) -> Registered<M> {
    agent.register(memory).unwrap_or_else(|failed| panic!("{}", failed.cause))
}

#[test]
fn ucx_registers_device_memory_again_and_again() {
    let Some(context) = device("ucx_registers_device_memory_again_and_again", 0) else { return };
    let agent = ucx();
    let memory = Region::new(allocate(&DeviceAllocator::new(&context), MIB));
    for _ in 0..100 {
        let registered = register(&agent, memory.clone());
        let record = registered.record();
        assert!(record.accepted_by(&"UCX".into()), "{record:?}");
        assert_eq!(record.span.kind, StorageKind::Device(DeviceId::new(0)));
    }
    assert_eq!(context.lost(), None);
}

#[test]
fn device_memory_outlives_the_agent_that_registered_it() {
    let Some(context) = device("device_memory_outlives_the_agent_that_registered_it", 0) else {
        return;
    };
    let agent = ucx();
    let registered = register(&agent, allocate(&DeviceAllocator::new(&context), MIB));
    let again = Region::new(registered);
    let twice = register(&agent, again.clone());
    drop(agent);
    drop(again);
    std::thread::scope(|scope| {
        scope.spawn(move || drop(twice));
    });
    assert_eq!(context.lost(), None);
    assert_eq!(context.failed_drops(), 0);
}

#[test]
fn a_layout_on_the_device_is_one_registration() {
    let Some(context) = device("a_layout_on_the_device_is_one_registration", 0) else { return };
    let agent = ucx();
    let config = LayoutConfig::builder()
        .num_blocks(16)
        .num_layers(4)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(1024)
        .element(ElementFormat::Width(2))
        .build()
        .unwrap();
    let layout = LayoutBuilder::new(config)
        .layer_separate(BlockDimension::Second)
        .allocate(&DeviceAllocator::new(&context))
        .register(&agent)
        .build()
        .unwrap();
    let registrations = layout.registrations();
    assert_eq!(registrations.len(), 1);
    let record = &registrations[0].record;
    assert!(layout.regions().iter().all(|region| record.span.covers(&Span::of(region))));
    drop(agent);
    drop(layout);
    assert_eq!(context.failed_drops(), 0);
}

#[test]
fn ucx_registers_pinned_memory() {
    let Some(context) = device("ucx_registers_pinned_memory", 0) else { return };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let registered = register(&ucx(), allocate(&pinned, MIB));
    assert_eq!(registered.record().span.kind, StorageKind::Pinned);
    drop(registered.into_memory());
    assert_eq!(context.failed_drops(), 0);
}

#[test]
fn memory_of_a_second_device_is_registered_as_its_own() {
    let test = "memory_of_a_second_device_is_registered_as_its_own";
    let Some(first) = device(test, 0) else { return };
    let Some(second) = device(test, 1) else { return };
    let agent = ucx();
    let registered =
        [&first, &second].map(|at| register(&agent, allocate(&DeviceAllocator::new(at), MIB)));
    let kinds = registered.each_ref().map(|memory| memory.record().span.kind);
    assert_eq!(kinds, [0, 1].map(|id| StorageKind::Device(DeviceId::new(id))));
}

#[test]
fn gds_registers_a_file_and_device_memory() {
    let test = "gds_registers_a_file_and_device_memory";
    let Some(context) = device(test, 0) else { return };
    let Some(agent) = gds(test) else { return };
    let types = agent.memory_types(&"GDS".into()).unwrap();
    assert!(types.contains(&MemoryType::File) && types.contains(&MemoryType::Device), "{types:?}");
    let device = register(&agent, allocate(&DeviceAllocator::new(&context), MIB));
    assert!(device.record().accepted_by(&"GDS".into()));

    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"));
    let directory = directory.or_else(|_| tempfile::tempdir()).unwrap();
    // cuFile looks at the path of a file, so this one has a name.
    let path = directory.path().join("file");
    let file = DiskFile::create_new(&path, MIB, &DiskOptions::default()).unwrap();
    match agent.register(file) {
        Ok(registered) => assert!(registered.record().accepted_by(&"GDS".into())),
        Err(failed) if is_refused_by_cufile(&failed.cause) => {
            eprintln!("skipped: {test}: cuFile takes no file here: {}", chain(&failed.cause));
        }
        Err(failed) => panic!("{}", chain(&failed.cause)),
    }
}

#[test]
fn gds_and_gds_mt_are_told_apart_by_name() {
    let test = "gds_and_gds_mt_are_told_apart_by_name";
    if device(test, 0).is_none() {
        return;
    }
    let variables =
        [("TERRANE_NIXL_BACKENDS", "GDS_MT"), ("TERRANE_NIXL_FILE_ACCESS_GDS_MT", "buffered")];
    let builder = AgentBuilder::from_variables(variables).unwrap();
    let expected = BackendConfig::new("GDS_MT").file_access(FileAccess::Buffered);
    assert_eq!(builder.backends(), [expected]);
    let Some(agent) = with_gds(test, builder) else { return };
    assert!(agent.memory_types(&"GDS_MT".into()).is_some());
}
