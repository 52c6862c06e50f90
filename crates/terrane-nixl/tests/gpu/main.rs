//! Memory of a real device, registered with UCX and with GDS.
//!
//! Each test states its needs, and prints `skipped: NAME: REASON` if one is not met.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test says what it expects by panicking"
)]

#[path = "../common/cufile.rs"]
mod cufile;
mod machine;
#[path = "../../../terrane-cuda/tests/gpu/needs.rs"]
#[allow(dead_code, reason = "the needs of other tests are there as well")]
mod needs;
#[path = "../common/processes.rs"]
mod processes;
mod transfers;

use std::error::Error;

use terrane_core::{
    Alignment, Allocate, ByteCount, DeviceId, Memory, Region, RegionRequest, Register, Registered,
    Span, StorageKind,
};
use terrane_cuda::{DeviceAllocator, PinnedAllocator, PinnedOptions};
use terrane_layout::{BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig};
use terrane_nixl::{Agent, AgentBuilder, BackendConfig, FileAccess, MemoryType};
use terrane_storage::{DiskFile, DiskOptions};

use machine::{device, gds, refused_by_cufile, two_devices, with_gds};
use needs::LITTLE;

const MIB: ByteCount = ByteCount::mib(1);

/// An agent with UCX. On a machine with a device this fails only because of a defect.
fn ucx() -> Agent {
    AgentBuilder::unnamed().backend(BackendConfig::new("UCX").required()).build().unwrap()
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
    let Some(context) = device("ucx_registers_device_memory_again_and_again", LITTLE) else {
        return;
    };
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
    let Some(context) = device("device_memory_outlives_the_agent_that_registered_it", LITTLE)
    else {
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
    let Some(context) = device("a_layout_on_the_device_is_one_registration", LITTLE) else {
        return;
    };
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
    let Some(context) = device("ucx_registers_pinned_memory", LITTLE) else { return };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let registered = register(&ucx(), allocate(&pinned, MIB));
    assert_eq!(registered.record().span.kind, StorageKind::Pinned);
    drop(registered.into_memory());
    assert_eq!(context.failed_drops(), 0);
}

#[test]
fn memory_of_a_second_device_is_registered_as_its_own() {
    let test = "memory_of_a_second_device_is_registered_as_its_own";
    let Some([first, second]) = two_devices(test, LITTLE) else { return };
    let agent = ucx();
    let registered =
        [&first, &second].map(|at| register(&agent, allocate(&DeviceAllocator::new(at), MIB)));
    let kinds = registered.each_ref().map(|memory| memory.record().span.kind);
    assert_eq!(kinds, [0, 1].map(|id| StorageKind::Device(DeviceId::new(id))));
}

#[test]
fn gds_registers_a_file_and_device_memory() {
    let test = "gds_registers_a_file_and_device_memory";
    let Some(context) = device(test, LITTLE) else { return };
    let Some(agent) = gds(test) else { return };
    let types = agent.memory_types(&"GDS".into()).unwrap();
    assert!(types.contains(&MemoryType::File) && types.contains(&MemoryType::Device), "{types:?}");
    let device = register(&agent, allocate(&DeviceAllocator::new(&context), MIB));
    assert!(device.record().accepted_by(&"GDS".into()));

    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"));
    let directory = directory.or_else(|_| tempfile::tempdir()).unwrap();
    // cuFile reads the path of a file, so this file has a name.
    let path = directory.path().join("file");
    let file = DiskFile::create_new(&path, MIB, &DiskOptions::default()).unwrap();
    match agent.register(file) {
        Ok(registered) => assert!(registered.record().accepted_by(&"GDS".into())),
        Err(failed) => refused_by_cufile(test, directory.path(), &failed.cause),
    }
}

#[test]
fn gds_and_gds_mt_have_different_names() {
    let test = "gds_and_gds_mt_have_different_names";
    if device(test, LITTLE).is_none() {
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
