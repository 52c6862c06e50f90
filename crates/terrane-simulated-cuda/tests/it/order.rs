//! Streams and events: the order in which work runs.

use std::sync::Mutex;

use terrane_simulated_cuda::exports::*;

use crate::support::*;

const BYTES: usize = 10_000;

#[test]
fn a_stream_runs_in_order_whatever_the_policy() {
    for config in configs() {
        let _cuda = Cuda::new(config.clone());
        let (memory, seen) = (allocate(BYTES), Pinned::new(BYTES));
        let stream = stream(NON_BLOCKING);
        for value in 1..=20 {
            ok(fill(memory, value, BYTES, stream));
        }
        ok(copy(seen.address, memory, BYTES, stream));
        ok(synchronize(stream));
        assert!(seen.bytes().iter().all(|&byte| byte == 20), "{config:?}");
    }
}

#[test]
fn a_wait_uses_the_current_record_of_its_event() {
    for config in configs() {
        let _cuda = Cuda::new(config.clone());
        let (memory, seen) = (allocate(BYTES), Pinned::new(BYTES));
        let (first, second, slow) =
            (stream(NON_BLOCKING), stream(NON_BLOCKING), stream(NON_BLOCKING));
        let event = event();
        ok(fill(memory, 7, BYTES, first));
        record(event, first);
        wait_for(second, event);
        // Recorded again, behind work that does not run: the wait does not use this record.
        hold(slow);
        let elsewhere = allocate(BYTES);
        ok(fill(elsewhere, 9, BYTES, slow));
        record(event, slow);
        ok(copy(seen.address, memory, BYTES, second));
        ok(synchronize(second));
        assert!(seen.bytes().iter().all(|&byte| byte == 7), "{config:?}");
        assert!(!is_done(event), "it marks work that is held back");
        release(slow);
        // SAFETY: no pointers.
        ok(unsafe { cuEventSynchronize(event) });
        assert!(is_done(event));
    }
}

#[test]
fn an_event_can_be_destroyed_while_a_stream_waits_for_it() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let (memory, seen) = (allocate(BYTES), Pinned::new(BYTES));
        let (first, second) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
        let event = event();
        assert!(is_done(event), "never recorded");
        ok(fill(memory, 3, BYTES, first));
        record(event, first);
        wait_for(second, event);
        // SAFETY: no pointers.
        ok(unsafe { cuEventDestroy_v2(event) });
        // SAFETY: as above.
        ok(unsafe { cuStreamDestroy_v2(first) });
        ok(copy(seen.address, memory, BYTES, second));
        ok(synchronize(second));
        assert!(seen.bytes().iter().all(|&byte| byte == 3));
        for code in [
            // SAFETY: as above.
            unsafe { cuEventQuery(event) },
            // SAFETY: as above.
            unsafe { cuStreamQuery(first) },
        ] {
            assert_eq!(code, 400, "a stale handle");
        }
    }
}

#[test]
fn streams_without_order_run_in_any_order() {
    let mut outcomes = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let _cuda = Cuda::new(terrane_simulated_cuda::Config { seed, ..small() });
        let memory = allocate(64);
        let streams = [1, 2, 3].map(|value| (value, stream(NON_BLOCKING)));
        for (value, stream) in streams {
            ok(fill(memory, value, 64, stream));
        }
        for (_, stream) in streams {
            ok(synchronize(stream));
        }
        outcomes.insert(read(memory, 1));
    }
    assert_eq!(outcomes.len(), 3, "each of them is last for some seed");
}

#[test]
fn the_default_stream_waits_for_blocking_streams() {
    for config in configs() {
        let _cuda = Cuda::new(config.clone());
        let (memory, seen) = (allocate(BYTES), Pinned::new(BYTES));
        let blocking = stream(0);
        for value in [1, 2, 3] {
            ok(fill(memory, value, BYTES, blocking));
            ok(copy(seen.address, memory, BYTES, 0));
            ok(fill(memory, 99, BYTES, blocking));
            ok(synchronize(0));
            assert!(seen.bytes().iter().all(|&byte| byte == value), "{config:?}");
        }
    }
}

#[test]
fn lazy_work_runs_when_it_is_queried_and_not_at_once() {
    let _cuda = Cuda::new(lazy());
    let memory = allocate(BYTES);
    let (asked, other) = (stream(NON_BLOCKING), stream(NON_BLOCKING));
    hold(other);
    ok(fill(memory, 1, BYTES, asked));
    ok(fill(memory, 2, BYTES, other));
    let marked = event();
    record(marked, asked);
    let mut questions = 0;
    while !is_done(marked) {
        questions += 1;
    }
    assert!(questions >= 2, "work and mark are steps of their own: {questions}");
    // SAFETY: no pointers.
    assert_eq!(unsafe { cuStreamQuery(other) }, NOT_READY);
    release(other);
    ok(synchronize(other));
    assert_eq!(read(memory, BYTES), [2; BYTES]);
}

#[test]
fn a_thread_that_only_reads_memory_sees_progress() {
    for config in [lazy(), small()] {
        let _cuda = Cuda::new(terrane_simulated_cuda::Config { background: true, ..config });
        let (memory, seen) = (allocate(BYTES), Pinned::new(BYTES));
        let stream = stream(NON_BLOCKING);
        ok(fill(memory, 5, BYTES, stream));
        ok(copy(seen.address, memory, BYTES, stream));
        // There are no more calls, so the background thread runs the work.
        while seen.bytes().iter().any(|&byte| byte != 5) {
            std::thread::yield_now();
        }
    }
}

static CALLED: Mutex<Vec<(usize, u32)>> = Mutex::new(Vec::new());

extern "C" fn note(data: *mut ()) {
    let mut count = 0;
    // SAFETY: one number is written.
    let code = unsafe { cuDeviceGetCount(Out::to(&mut count)) };
    CALLED.lock().unwrap().push((data.addr(), code));
}

#[test]
fn host_functions_are_called_in_order_and_may_not_call_the_driver() {
    let _cuda = Cuda::new(small());
    let (stream, memory) = (stream(NON_BLOCKING), allocate(BYTES));
    let function = u64::try_from((note as *const ()).expose_provenance()).unwrap();
    for data in 1..=5 {
        ok(fill(memory, 1, BYTES, stream));
        // SAFETY: the function takes any number.
        ok(unsafe { cuLaunchHostFunc(stream, function, data) });
    }
    ok(synchronize(stream));
    assert_eq!(*CALLED.lock().unwrap(), [(1, 800), (2, 800), (3, 800), (4, 800), (5, 800)]);
}

#[test]
fn many_threads_share_devices() {
    let cuda = Cuda::new(small());
    let (session, context) = (&cuda.session, cuda.context);
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            scope.spawn(move || {
                let _attached = session.attach();
                let mut current = 1;
                // SAFETY: one handle is written.
                ok(unsafe { cuCtxGetCurrent(Out::to(&mut current)) });
                assert_eq!(current, 0, "each thread has its own context stack");
                // SAFETY: one number would be written.
                assert_eq!(unsafe { cuMemGetInfo_v2(Out::null(), Out::null()) }, 201);
                // SAFETY: no pointers.
                ok(unsafe { cuCtxPushCurrent_v2(context) });
                let (memory, seen) = (allocate(BYTES), Pinned::new(BYTES));
                // The handle of the per-thread default stream.
                for round in 0..20 {
                    let value = thread * 20 + round;
                    ok(fill(memory, value, BYTES, 2));
                    ok(copy(seen.address, memory, BYTES, 2));
                    ok(synchronize(2));
                    assert!(seen.bytes().iter().all(|&byte| byte == value));
                }
            });
        }
    });
}

/// By the handle of the per-thread default stream, a thread neither waits for nor marks work that
/// another thread has submitted with the same handle.
#[test]
fn each_thread_has_its_own_per_thread_default_stream() {
    const PER_THREAD: u64 = 2;
    for config in configs() {
        let cuda = Cuda::new(config);
        let (slow, memory, before) = (stream(NON_BLOCKING), allocate(BYTES), event());
        hold(slow);
        ok(fill(memory, 1, BYTES, slow));
        record(before, slow);
        wait_for(PER_THREAD, before);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _attached = cuda.session.attach();
                // SAFETY: no pointers.
                ok(unsafe { cuCtxPushCurrent_v2(cuda.context) });
                ok(synchronize(PER_THREAD));
                let mark = event();
                record(mark, PER_THREAD);
                // SAFETY: no pointers.
                ok(unsafe { cuEventSynchronize(mark) });
            });
        });
        let mark = event();
        record(mark, PER_THREAD);
        assert!(!is_done(mark), "this thread's stream is behind work that is held back");
        release(slow);
        ok(synchronize(PER_THREAD));
        assert!(is_done(mark));
    }
}

/// A limit holds back the work of all streams, in their order.
#[test]
fn a_limit_lets_so_many_operations_run() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let (first, second, memory) = (stream(NON_BLOCKING), stream(NON_BLOCKING), allocate(BYTES));
        let marks = [(); 4].map(|()| event());
        limit(0);
        for (at, mark) in marks.iter().enumerate() {
            let stream = if at < 2 { first } else { second };
            wait_for(second, marks[0]);
            ok(fill(memory, 1, BYTES, stream));
            record(*mark, stream);
        }
        let done = || marks.iter().filter(|mark| is_done(**mark)).count();
        for _ in 0..10 {
            assert_eq!(done(), 0);
        }
        limit(2);
        while done() == 0 {}
        for _ in 0..10 {
            assert!(done() < 3, "{}", done());
        }
        limit(u64::MAX);
        ok(synchronize(first));
        ok(synchronize(second));
        assert_eq!(done(), 4);
    }
}
