//! A kernel writes to an invalid address and loses the context, in a child process.

use std::ffi::{CString, c_void};
use std::ptr;
use std::time::Duration;

use cudarc::driver::{CudaContext, sys};
use terrane_core::{Allocate, AllocateError, ByteCount, DeviceId, RegionRequest};
use terrane_cuda::{
    Context, CudaError, CudaStreams, DeviceAllocator, DevicePool, DriverCode, Event,
    PinnedAllocator, PinnedOptions, Stream, Timing,
};
use terrane_pool::{FenceSource, StreamSource};
use terrane_testkit::process::in_child;

use crate::needs::{LITTLE, device};

/// Writes to an address without memory.
const PTX: &str = "
.version 7.0
.target sm_50
.address_size 64
.visible .entry poke()
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    mov.u64 %rd1, 64;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

fn poke(stream: &Stream) {
    CudaContext::new(0).unwrap().bind_to_thread().unwrap();
    let (text, name) = (CString::new(PTX).unwrap(), CString::new("poke").unwrap());
    let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: one handle is written, and the text ends with a zero byte.
    let code = unsafe { sys::cuModuleLoadData(&raw mut module, text.as_ptr().cast::<c_void>()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: one handle is written, and the module is loaded.
    let code = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    let none = ptr::null_mut();
    let stream = stream.handle().cast();
    // SAFETY: the kernel has no parameter, and the test is about its effect.
    let code = unsafe {
        sys::cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, none, ptr::null_mut())
    };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

#[test]
fn every_call_reports_a_lost_context_and_drops_do_not_panic() {
    in_child("lost::every_call_reports_a_lost_context_and_drops_do_not_panic", || {
        let name = "lost::every_call_reports_a_lost_context_and_drops_do_not_panic";
        let Some(context) = device(name, LITTLE) else { return };
        let request = RegionRequest::new(ByteCount::mib(4));
        let allocator = DeviceAllocator::new(&context);
        let pool = DevicePool::new(&context, ByteCount::mib(64)).unwrap();
        let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
        let held = (
            allocator.allocate(&request).unwrap(),
            pool.allocate(&request).unwrap(),
            pinned.allocate(&request).unwrap(),
        );
        let stream = Stream::new(&context).unwrap();
        let streams = CudaStreams::new(&context);
        let id = StreamSource::create(&streams).unwrap();
        let event = Event::new(&context, Timing::Off).unwrap();
        let fence = FenceSource::create(&streams).unwrap();
        assert_eq!(context.lost(), None);

        poke(&stream);
        let error = stream.synchronize().unwrap_err();
        eprintln!("{error}");
        let illegal_address = DriverCode::new(700);
        assert!(error.is_context_lost(), "{error}");
        assert_eq!(error.code(), Some(illegal_address));
        assert!(error.to_string().contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{error}");
        assert_eq!(context.lost(), Some(illegal_address));

        assert!(stream.is_idle().unwrap_err().is_context_lost());
        assert!(Event::new(&context, Timing::Off).unwrap_err().is_context_lost());
        assert!(Stream::new(&context).unwrap_err().is_context_lost());
        assert!(event.record(&stream).unwrap_err().is_context_lost());
        assert!(matches!(event.is_complete(), Err(CudaError::NotRecorded)));
        assert!(fence.record(id).is_err());
        assert!(fence.wait(Duration::from_secs(1)).is_err(), "it proves nothing");
        for error in [
            allocator.allocate(&request).unwrap_err(),
            pool.allocate(&request).unwrap_err(),
            pinned.allocate(&request).unwrap_err(),
        ] {
            assert!(!error.is_exhaustion(), "{error}");
            assert!(matches!(error, AllocateError::Backend { .. }), "{error}");
        }
        let again = Context::primary(DeviceId::new(0));
        eprintln!("another handle to the context: {:?}", again.as_ref().err());
        drop(again);

        let before = context.failed_drops();
        drop((held, pool, stream, streams, event, fence));
        eprintln!("{} drops failed, none in a panic", context.failed_drops() - before);
        assert!(context.failed_drops() > before);
        assert_eq!(context.lost(), Some(illegal_address), "the first code stays");
    });
}
