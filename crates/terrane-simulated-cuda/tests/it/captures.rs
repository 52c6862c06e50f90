//! Streams that are captured into graphs.

use std::thread;

use terrane_simulated_cuda::exports::*;

use crate::support::{Cuda, NON_BLOCKING, configs, make_current, ok, stream};

const UNSUPPORTED: u32 = 900;
const INVALIDATED: u32 = 901;
const UNJOINED: u32 = 904;
const CAPTURED_EVENT: u32 = 907;
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

fn begin(stream: u64) {
    // SAFETY: no pointers.
    ok(unsafe { cuStreamBeginCapture_v2(stream, GLOBAL) });
}

fn end(stream: u64) -> u32 {
    let mut graph = 0;
    // SAFETY: one handle is written.
    unsafe { cuStreamEndCapture(stream, Out::to(&mut graph)) }
}

fn query(stream: u64) -> u32 {
    // SAFETY: no pointers.
    unsafe { cuStreamQuery(stream) }
}

/// Sets this thread's capture mode; returns the previous mode.
fn exchange(mode: u32) -> u32 {
    let mut mode = mode;
    // SAFETY: one number is read and written.
    ok(unsafe { cuThreadExchangeStreamCaptureMode(Out::to(&mut mode)) });
    mode
}

fn event() -> u64 {
    let mut event = 0;
    // SAFETY: one handle is written.
    ok(unsafe { cuEventCreate(Out::to(&mut event), 0) });
    event
}

/// A thread's query invalidates another thread's capture, unless its mode is relaxed.
#[test]
fn a_query_of_another_thread_invalidates_a_capture() {
    for config in configs() {
        let cuda = Cuda::new(config);
        let (captured, other) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
        for (mode, answer, ended) in [(GLOBAL, UNSUPPORTED, INVALIDATED), (RELAXED, 0, 0)] {
            begin(captured);
            thread::scope(|scope| {
                scope.spawn(|| {
                    let _attached = cuda.session.attach();
                    make_current(0);
                    assert_eq!((exchange(mode), query(other)), (GLOBAL, answer));
                });
            });
            assert_eq!(end(captured), ended);
        }
        assert_eq!((query(captured), query(other)), (0, 0));
    }
}

/// A stream that waits for an event of a capture joins it.
#[test]
fn streams_join_a_capture_through_events() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let (captured, other, event) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event());
        begin(captured);
        // SAFETY: no pointers.
        ok(unsafe { cuEventRecord(event, captured) });
        assert_eq!(exchange(RELAXED), GLOBAL);
        // SAFETY: no pointers.
        assert_eq!(unsafe { cuEventQuery(event) }, CAPTURED_EVENT, "which invalidates the capture");
        assert_eq!(exchange(GLOBAL), RELAXED);
        let status = |stream| {
            let mut status = 9;
            // SAFETY: one number is written.
            ok(unsafe { cuStreamIsCapturing(stream, Out::to(&mut status)) });
            status
        };
        assert_eq!((status(captured), status(other)), (2, 0));
        assert_eq!(end(captured), INVALIDATED);
        begin(captured);
        // SAFETY: no pointers.
        ok(unsafe { cuEventRecord(event, captured) });
        // SAFETY: no pointers.
        ok(unsafe { cuStreamWaitEvent(other, event, 0) });
        assert_eq!((status(captured), status(other)), (1, 1));
        assert_eq!(end(captured), UNJOINED);
        assert_eq!((status(captured), status(other), query(other)), (0, 0, 0));
    }
}
