//! Copies: staged, in batches, across devices, and partly complete.

use terrane_simulated_cuda::exports::*;

use crate::support::*;

const BYTES: usize = 1 << 16;

#[test]
fn pageable_memory_is_read_before_the_call_returns() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let (memory, stream) = (allocate(BYTES), stream(NON_BLOCKING));
        let mut source = vec![6_u8; BYTES];
        hold(stream);
        let from = u64::try_from(source.as_ptr().expose_provenance()).unwrap();
        ok(copy(memory, from, BYTES, stream));
        source.fill(0);
        release(stream);
        ok(synchronize(stream));
        assert!(read(memory, BYTES).iter().all(|&byte| byte == 6));
    }
}

#[test]
fn pageable_memory_is_written_before_the_call_returns() {
    for config in configs() {
        let _cuda = Cuda::new(config);
        let (memory, stream) = (allocate(BYTES), stream(NON_BLOCKING));
        ok(fill(memory, 8, BYTES, stream));
        let mut seen = vec![0_u8; BYTES];
        let to = u64::try_from(seen.as_mut_ptr().expose_provenance()).unwrap();
        ok(copy(to, memory, BYTES, stream));
        assert!(seen.iter().all(|&byte| byte == 8));
    }
}

#[test]
fn pinned_memory_is_read_when_the_copy_runs() {
    let _cuda = Cuda::new(lazy());
    let (memory, stream, source) = (allocate(BYTES), stream(NON_BLOCKING), Pinned::new(BYTES));
    source.fill(1);
    hold(stream);
    ok(copy(memory, source.address, BYTES, stream));
    source.fill(2);
    release(stream);
    ok(synchronize(stream));
    assert!(read(memory, BYTES).iter().all(|&byte| byte == 2));
}

#[test]
fn a_copy_is_partly_visible_before_it_is_waited_for() {
    let mut halves = 0;
    for seed in 0..10 {
        let _cuda = Cuda::new(terrane_simulated_cuda::Config { seed, ..lazy() });
        let (memory, stream, seen) = (allocate(BYTES), stream(NON_BLOCKING), Pinned::new(BYTES));
        ok(fill(memory, 9, BYTES, stream));
        ok(synchronize(stream));
        ok(copy(seen.address, memory, BYTES, stream));
        // SAFETY: a number would be written.
        ok(unsafe { terraneSimulatedStep(1, Out::null()) });
        let done = seen.bytes().iter().filter(|&&byte| byte == 9).count();
        halves += usize::from(done > 0 && done < BYTES);
        ok(synchronize(stream));
        assert!(seen.bytes().iter().all(|&byte| byte == 9));
    }
    assert!(halves > 0);
}

#[test]
fn a_batch_reads_its_sources_in_the_requested_order() {
    const DURING_CALL: u32 = 2;
    const STREAM: u32 = 1;
    const ANY: u32 = 3;
    for config in configs() {
        let _cuda = Cuda::new(config);
        let (memory, stream) = (allocate(BYTES), stream(NON_BLOCKING));
        let source = Pinned::new(BYTES);
        source.fill(1);
        hold(stream);
        let (to, from): (Vec<u64>, Vec<u64>) =
            (0..8).map(|n| (memory + n * 1000, source.address + (7 - n) * 1000)).unzip();
        let attributes = [[DURING_CALL, 0, 0, 0, 0, 0], [STREAM, 0, 0, 0, 0, 0]];
        let batch = |to: &[u64], attributes: &[[u32; 6]], begins: &[usize], failed: &mut usize| {
            let lengths = vec![1000; to.len()];
            // SAFETY: every array has the stated length.
            unsafe {
                cuMemcpyBatchAsync(
                    In::of(to),
                    In::of(&from),
                    In::of(&lengths),
                    to.len(),
                    In::of(attributes),
                    In::of(begins),
                    begins.len(),
                    Out::to(failed),
                    stream,
                )
            }
        };
        let mut failed = 0;
        ok(batch(&to, &attributes, &[0, 4], &mut failed));
        source.fill(2);
        release(stream);
        ok(synchronize(stream));
        let seen = read(memory, 8000);
        assert!(seen[..4000].iter().all(|&byte| byte == 1), "read during the call");
        assert!(seen[4000..].iter().all(|&byte| byte == 2), "read in the stream's order");
        // A copy that leaves its allocation is named; without attributes nothing is copied.
        let mut bad = to.clone();
        bad[5] = memory + u64::try_from(BYTES).unwrap() - 10;
        assert_eq!(batch(&bad, &[[ANY, 0, 0, 0, 0, 0]], &[0], &mut failed), INVALID_VALUE);
        assert_eq!(failed, 5);
        assert_eq!(batch(&to, &[], &[], &mut failed), INVALID_VALUE);
        assert_eq!(batch(&to, &attributes, &[1, 4], &mut failed), INVALID_VALUE);
    }
}

#[test]
fn copies_work_across_devices() {
    for config in configs() {
        let cuda = Cuda::new(config);
        let (here, stream) = (allocate(BYTES), stream(NON_BLOCKING));
        let other = make_current(1);
        let there = allocate(BYTES);
        // SAFETY: no pointers.
        ok(unsafe { cuCtxSetCurrent(cuda.context) });
        ok(fill(here, 11, BYTES, stream));
        // SAFETY: both live until the stream has been synchronised.
        let code = unsafe { cuMemcpyPeerAsync(there, other, here, cuda.context, BYTES, stream) };
        ok(code);
        // SAFETY: as above; the contexts are exchanged.
        let code = unsafe { cuMemcpyPeerAsync(there, cuda.context, here, other, BYTES, stream) };
        assert_eq!(code, INVALID_VALUE);
        ok(synchronize(stream));
        assert!(read(there, BYTES).iter().all(|&byte| byte == 11));
    }
}
