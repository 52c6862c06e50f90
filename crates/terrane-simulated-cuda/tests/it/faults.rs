//! Sticky errors, and requested faults.

use terrane_simulated_cuda::exports::*;

use crate::support::*;

fn fail(function: &std::ffi::CStr, spared: u64, code: u32) {
    let name = In::of(function.to_bytes_with_nul()).cast();
    // SAFETY: the name ends with a zero byte.
    ok(unsafe { terraneSimulatedFail(name, spared, code) });
}

#[test]
fn a_lost_context_returns_its_error_from_every_call_until_it_is_destroyed() {
    let cuda = Cuda::new(small());
    let (stream, event, memory) = (stream(NON_BLOCKING), event(), allocate(100));
    record(event, stream);
    // SAFETY: no pointers.
    ok(unsafe { terraneSimulatedLoseNow(0, ILLEGAL_ADDRESS) });
    let mut value = 0;
    let answers = [
        synchronize(stream),
        fill(memory, 0, 100, stream),
        copy(memory, memory + 50, 50, stream),
        // SAFETY: no pointers here, and one value is written below.
        unsafe { cuStreamQuery(stream) },
        // SAFETY: as above.
        unsafe { cuEventQuery(event) },
        // SAFETY: as above.
        unsafe { cuEventRecord(event, stream) },
        // SAFETY: as above.
        unsafe { cuMemFree_v2(memory) },
        // SAFETY: as above.
        unsafe { cuMemAlloc_v2(Out::to(&mut value), 100) },
        // SAFETY: as above.
        unsafe { cuStreamCreate(Out::to(&mut value), 0) },
        // SAFETY: as above.
        unsafe { cuCtxSynchronize() },
    ];
    assert_eq!(answers, [ILLEGAL_ADDRESS; 10]);
    // The other device is not affected, and the context stack still works.
    make_current(1);
    allocate(100);
    // SAFETY: no pointers.
    ok(unsafe { cuCtxSetCurrent(cuda.context) });
    // SAFETY: no pointers.
    ok(unsafe { cuDevicePrimaryCtxRelease_v2(0) });
    make_current(0);
    allocate(100);
}

#[test]
fn the_chosen_call_fails_once() {
    let _cuda = Cuda::new(small());
    fail(c"cuMemAlloc_v2", 2, 2);
    fail(c"cuMemAlloc_v2", 0, 999);
    let codes: Vec<u32> = (0..5)
        .map(|_| {
            let mut address = 0;
            // SAFETY: one address is written.
            unsafe { cuMemAlloc_v2(Out::to(&mut address), 10) }
        })
        .collect();
    assert_eq!(codes, [0, 0, 2, 999, 0]);
    fail(c"cuMemAlloc_v2", 0, 2);
    let mut left = 0;
    // SAFETY: one number is written.
    ok(unsafe { terraneSimulatedClearFaults(Out::to(&mut left)) });
    assert_eq!(left, 1);
    allocate(10);
}

#[test]
fn the_context_is_lost_at_the_chosen_operation() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let (stream, memory) = (stream(NON_BLOCKING), allocate(100));
        // SAFETY: no pointers.
        ok(unsafe { terraneSimulatedLose(0, 2, 719) });
        for _ in 0..2 {
            ok(fill(memory, 0, 100, stream));
            ok(synchronize(stream));
        }
        // The eager policy loses it at the call that submits the operation.
        let _ = fill(memory, 0, 100, stream);
        assert_eq!(synchronize(stream), 719);
    }
}

#[test]
fn every_call_fails_before_initialisation() {
    let mut count = 0;
    // This thread is not attached, and no other thread of this process calls `cuInit` like this.
    // SAFETY: one number is written.
    assert_eq!(unsafe { cuDeviceGetCount(Out::to(&mut count)) }, 3);
    let session = terrane_simulated_cuda::Session::start(terrane_simulated_cuda::Config {
        devices: 0,
        ..small()
    });
    let session = session.unwrap();
    let _attached = session.attach();
    // SAFETY: no pointers.
    assert_eq!(unsafe { cuInit(0) }, 100, "no device");
}

#[test]
fn functions_are_found_by_their_documented_names() {
    let _cuda = Cuda::new(small());
    let find = |name: &std::ffi::CStr, version: i32| {
        let mut function = std::ptr::null();
        let name = In::of(name.to_bytes_with_nul()).cast();
        // SAFETY: one pointer is written; the name ends with a zero byte.
        let code =
            unsafe { cuGetProcAddress_v2(name, Out::to(&mut function), version, 0, Out::null()) };
        (code == 0).then_some(function)
    };
    assert_eq!(find(c"cuMemAlloc", 12_000), Some(cuMemAlloc_v2 as *const ()));
    assert_eq!(find(c"cuMemcpyBatchAsync", 12_080), Some(cuMemcpyBatchAsync as *const ()));
    assert_eq!(find(c"cuMemcpyBatchAsync", 13_000), Some(cuMemcpyBatchAsync_v2 as *const ()));
    assert_eq!(find(c"cuNoSuchThing", 13_000), None);
}
