//! Requested properties of streams and memory, compared with what the driver created.

use cudarc::driver::{CudaContext, sys};
use terrane_core::{
    Allocate, AllocateError, ByteCount, Capability, CapabilityStatus, Memory, RegionRequest,
    Requirement,
};
use terrane_cuda::{
    Context, CudaStreams, PinnedAllocator, PinnedNuma, PinnedOptions, ResourceCount, Stream,
    StreamPriority,
};
use terrane_pool::StreamSource;
use terrane_storage::{HugePages, NodeId, NumaPolicy, SystemOptions};

use crate::needs::{LITTLE, device};

fn priority(stream: &Stream) -> i32 {
    let mut priority = 0;
    // SAFETY: the stream is alive, and one number is written.
    let code = unsafe { sys::cuStreamGetPriority(stream.handle().cast(), &raw mut priority) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    priority
}

#[test]
fn streams_have_the_requested_priority() {
    let name = "streams_have_the_requested_priority";
    let Some(context) = device(name, LITTLE) else { return };
    CudaContext::new(0).unwrap().bind_to_thread().unwrap();
    let (mut lowest, mut highest) = (0, 0);
    // SAFETY: two numbers are written.
    let code = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut lowest, &raw mut highest) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    let of = |asked| priority(&Stream::with_priority(&context, asked).unwrap());
    assert_eq!(of(StreamPriority::Lowest), lowest);
    assert_eq!(of(StreamPriority::Highest), highest);
    assert_eq!(of(StreamPriority::Default), 0);
    assert_eq!(priority(&Stream::new(&context).unwrap()), 0);
    let streams = CudaStreams::with_priority(&context, StreamPriority::Highest);
    let pooled = StreamSource::create(&streams).unwrap();
    assert_eq!(priority(&streams.get(pooled).unwrap()), highest);
}

/// The flags with which the driver allocated or registered memory.
fn flags(context: &Context, options: PinnedOptions) -> u32 {
    let pinned = PinnedAllocator::new(context, options).unwrap();
    let memory = pinned.allocate(&RegionRequest::new(ByteCount::mib(2))).unwrap();
    assert!(memory.device_alias().is_some());
    let mut flags = 0;
    let address = memory.address().as_ptr().cast();
    // SAFETY: the memory is alive, and one number is written.
    let code = unsafe { sys::cuMemHostGetFlags(&raw mut flags, address) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    flags
}

#[test]
fn the_drivers_memory_is_portable_mapped_and_cached() {
    /// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTALLOC_DEVICEMAP`.
    const USUAL: u32 = 3;
    /// `CU_MEMHOSTALLOC_WRITECOMBINED`.
    const WRITE_COMBINED: u32 = 4;
    let name = "the_drivers_memory_is_portable_mapped_and_cached";
    let Some(context) = device(name, LITTLE) else { return };
    CudaContext::new(0).unwrap().bind_to_thread().unwrap();
    let of_driver = PinnedOptions { registration: Requirement::Off, ..PinnedOptions::default() };
    let found = flags(&context, of_driver);
    assert_eq!(found & (WRITE_COMBINED | USUAL), USUAL, "{found:#x}");
}

/// Memory that the driver allocates is not bound to nodes, and has no huge pages. A preference for
/// either is reported as refused. A requirement is an error.
#[test]
fn requests_that_the_driver_ignores_are_reported_or_an_error() {
    let name = "requests_that_the_driver_ignores_are_reported_or_an_error";
    let Some(context) = device(name, LITTLE) else { return };
    let request = RegionRequest::new(ByteCount::mib(2));
    let allocate = |bound, huge| {
        let system =
            SystemOptions { huge_pages: HugePages::Transparent(huge), ..SystemOptions::default() };
        let numa = PinnedNuma::Policy(NumaPolicy::Bind(NodeId::new(0), bound));
        let registration = Requirement::Off;
        let options = PinnedOptions { system, numa, registration, ..PinnedOptions::default() };
        PinnedAllocator::new(&context, options).unwrap().allocate(&request)
    };
    let memory = allocate(Requirement::Preferred, Requirement::Preferred).unwrap();
    let report = memory.capabilities();
    for capability in [Capability::NumaBinding, Capability::TransparentHugePages] {
        let status = report.status(&capability);
        assert!(matches!(status, Some(CapabilityStatus::Refused(_))), "{capability}: {report}");
    }
    drop(memory);
    for (bound, huge) in
        [(Requirement::Required, Requirement::Off), (Requirement::Off, Requirement::Required)]
    {
        let error = allocate(bound, huge).unwrap_err();
        assert!(matches!(error, AllocateError::Capability { .. }), "{error}");
    }
    assert_eq!(context.usage().host, ResourceCount::default());
}
