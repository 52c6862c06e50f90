//! A pool between two stacks of adaptors over real memory, with faults below and a budget above.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use terrane_core::{Allocate, ByteCount, Location, Memory, RegionRequest};
use terrane_pool::adaptors::{
    Adapt, Budget, Counters, FillHost, LiveBlocks, PoisonBytes, Snapshot, TraceAction, TraceEvent,
    TraceReader, TraceSink,
};
use terrane_pool::{Pool, PoolOptions, Retry, SizeClasses, StreamId};
use terrane_testkit::fault::{FaultPlan, InjectFaults as _};
use terrane_testkit::random::Seeded;

use crate::heap::Heap;

const LABELS: [&str; 3] = ["kv", "scratch", "staging"];

/// Runs threads on one stack for `duration`, and returns the number of blocks allocated. Panics if
/// the accounts are not exact afterwards, or if a block had the bytes of another.
pub fn soak(seed: u64, threads: u64, duration: Duration) -> u64 {
    let heap = Heap::new(ByteCount::mib(48));
    let node = Budget::new("node", ByteCount::mib(40));
    let (held, live) = (LiveBlocks::new(), LiveBlocks::new());
    let (obtained, handed_out) = (Counters::new(), Counters::new());
    let sink = TraceSink::new(Vec::new());

    let below = heap
        .clone()
        .failing(FaultPlan::new().fail_randomly(20_000, seed))
        .delayed(3)
        .guarded()
        .poisoned(FillHost, PoisonBytes::default(), StreamId::new(0))
        .limited(node.child("held", ByteCount::mib(32)))
        .counted(obtained.clone())
        .traced(sink.clone())
        .tagged(held.clone());
    let options = PoolOptions {
        classes: SizeClasses::Steps4,
        cached_bytes: ByteCount::mib(8),
        largest_class: ByteCount::mib(1),
        ..PoolOptions::default()
    };
    let pool = Pool::new(below, options).expect("the options are valid");
    let guard = pool.guarded();
    let found = guard.log().clone();
    let stack = guard
        .limited(Budget::new("asked", ByteCount::mib(24)))
        .counted(handed_out.clone())
        .tagged(live.clone())
        .on_failure(NonZeroU32::MIN, |_| Retry::Again);

    let (ended, served) = (AtomicBool::new(false), AtomicU64::new(0));
    let passed = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let start = |worker: u64| {
            let random = Seeded::new(seed.wrapping_mul(0x1_0000).wrapping_add(worker));
            let (stack, passed, ended, served) = (&stack, &passed, &ended, &served);
            scope.spawn(move || {
                served.fetch_add(work(stack, passed, ended, random), Ordering::Relaxed);
            })
        };
        let workers: Vec<_> = (0..threads).map(start).collect();
        thread::sleep(duration);
        ended.store(true, Ordering::Relaxed);
        // The end of a scope does not wait for the destructors of thread-locals. A join does.
        workers.into_iter().for_each(|worker| worker.join().expect("a worker panicked"));
    });
    let served = served.into_inner();
    let blocks = passed.into_inner().unwrap();
    assert_eq!(handed_out.totals().current.count, live_blocks(&live));
    assert_eq!(handed_out.totals().total.count, served);
    assert_eq!(obtained.totals().current.count, live_blocks(&held));
    drop(blocks);
    drop(stack);
    for (what, counters) in [("obtained", obtained), ("allocated", handed_out)] {
        assert_eq!(counters.totals().current.bytes, 0, "{what}");
    }
    assert_eq!((live_blocks(&held), live_blocks(&live)), (0, 0));
    assert_eq!(node.live(), ByteCount::ZERO);
    assert_eq!((found.found(), heap.live_blocks()), (0, 0), "{:?}", found.violations());
    let log = sink.finish().expect("memory can be written").expect("it was not finished before");
    assert_every_block_is_freed(&log);
    served
}

/// Panics unless each block of the log is allocated, and freed before its address is used again.
fn assert_every_block_is_freed(log: &[u8]) {
    let mut live = BTreeSet::new();
    for event in TraceReader::new(log).expect("the log has its columns") {
        let TraceEvent { action, pointer, size, .. } = event.expect("the row is valid");
        // Blocks of zero bytes may share an address.
        let as_logged = size.is_zero()
            || match action {
                TraceAction::Allocate => live.insert(pointer),
                TraceAction::Free => live.remove(&pointer),
                TraceAction::AllocateFailure => true,
            };
        assert!(as_logged, "{action:?} of {pointer:#x}");
    }
    assert!(live.is_empty(), "{} blocks are not freed in the log", live.len());
}

fn live_blocks(table: &LiveBlocks) -> u64 {
    Snapshot::of(&[table]).blocks.len().try_into().expect("a count")
}

/// Writes a byte into each block, and checks at the end that the byte has not changed.
fn work<A: Allocate>(
    stack: &A,
    passed: &Mutex<Vec<(u8, A::Memory)>>,
    ended: &AtomicBool,
    mut random: Seeded,
) -> u64 {
    let (mut own, mut served) = (Vec::new(), 0);
    while !ended.load(Ordering::Relaxed) {
        let magnitude = random.below_u64(19);
        let bytes = ByteCount::new(random.below_u64(1 << magnitude));
        let label = LABELS[usize::try_from(random.below_u64(3)).expect("one of three")];
        if let Ok(memory) = stack.allocate(&RegionRequest::new(bytes).labelled(label)) {
            served += 1;
            let byte = u8::try_from(random.below_u64(256)).expect("a byte");
            ends(&memory, |end| *end = byte);
            own.push((byte, memory));
        }
        match random.below_u64(32) {
            0 => own.drain(..).for_each(check),
            1 => passed.lock().unwrap().append(&mut own),
            2 => {
                let taken = std::mem::take(&mut *passed.lock().unwrap());
                taken.into_iter().for_each(check);
            }
            3..10 => {}
            _ => own.pop().into_iter().for_each(check),
        }
    }
    passed.lock().unwrap().append(&mut own);
    served
}

fn check((byte, memory): (u8, impl Memory)) {
    ends(&memory, |end| assert_eq!(*end, byte, "another owner wrote to {memory:?}"));
}

/// Calls `show` with the first and the last byte.
fn ends(memory: &(impl Memory + ?Sized), mut show: impl FnMut(&mut u8)) {
    let length = memory.length().to_usize();
    let Location::Host(address) = memory.location() else {
        unreachable!("the memory is in the host's address space")
    };
    for offset in [0, length.saturating_sub(1)].into_iter().filter(|&offset| offset < length) {
        // SAFETY: the caller owns the block, and the offset is within its length.
        let byte = unsafe { address.as_ptr().add(offset) };
        // SAFETY: it is valid and initialised, and this is the only reference to it.
        show(unsafe { &mut *byte });
    }
}
