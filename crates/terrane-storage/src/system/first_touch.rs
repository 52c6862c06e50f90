//! First touch with several threads: the kernel allocates and zeroes pages before they are used.

use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

use terrane_core::sync::{lock, unpoisoned};
use terrane_core::{Alignment, ByteCount, OsError};

use super::mapping::Mapping;
use crate::sys;

/// The bytes that a thread takes at a time. A small chunk gives regular progress and lets the
/// threads finish together. A large chunk makes the cost of the calls negligible. It is a multiple
/// of the 2 MiB huge page.
const CHUNK: usize = 16 << 20;

/// The threads that touch, and their CPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct TouchThreads<'a> {
    pub(super) count: usize,
    /// The CPU affinity of the threads. `None` for any CPU.
    pub(super) cpus: Option<&'a [u32]>,
}

/// The result of touching.
#[derive(Debug, Default)]
pub(super) struct TouchOutcome {
    /// The bytes that were touched.
    pub(super) bytes: ByteCount,
    /// The reason why the kernel allocated no pages. `None` if it did.
    pub(super) failure: Option<OsError>,
    /// The reason why fewer threads ran than requested. `None` if all ran.
    pub(super) thread_refusal: Option<OsError>,
    /// The reason why threads ran on other CPUs than requested. `None` if they did not.
    pub(super) affinity_refusal: Option<OsError>,
}

/// Touches all of `mapping`, which has pages of size `page`. It calls `advance` with the bytes of
/// each piece. It stops early if `advance` returns `false` or the kernel runs out of pages.
pub(super) fn touch(
    mapping: &Mapping,
    page: Alignment,
    threads: TouchThreads<'_>,
    advance: &(dyn Fn(ByteCount) -> bool + Sync),
) -> TouchOutcome {
    let work = Work::new(mapping, page, sys::memory::can_populate(), advance);
    let count = work.thread_count(threads);
    if count <= 1 && threads.cpus.is_none() {
        work.run(None);
    } else {
        work.run_with(threads, count, || {});
    }
    unpoisoned(work.touched.into_inner())
}

/// Touches `mapping`, which may be in use, from the front to the end. It calls `advance` with the
/// bytes of each piece, and stops early if `advance` returns `false`. Each time that another `step`
/// bytes from the beginning, or all bytes, have been touched, the calling thread calls `reached`.
///
/// Call it only if the kernel can populate. No other method leaves the bytes unchanged.
pub(super) fn touch_from_the_front(
    mapping: &Mapping,
    page: Alignment,
    threads: TouchThreads<'_>,
    step: ByteCount,
    advance: &(dyn Fn(ByteCount) -> bool + Sync),
    reached: &mut dyn FnMut(ByteCount),
) -> TouchOutcome {
    let work = Work::new(mapping, page, true, advance);
    let (length, step) = (mapping.length(), step.to_usize().max(1));
    let count = work.thread_count(threads).max(1);
    work.run_with(threads, count, || {
        let mut reported = 0;
        while reported < length && !work.is_over.load(Ordering::Relaxed) {
            let next = reported.checked_add(step).unwrap_or(length).min(length);
            if !work.front.wait_for(next) {
                break;
            }
            reported = next;
            reached(ByteCount::from_usize(reported));
        }
        work.is_over.store(true, Ordering::Relaxed);
    });
    unpoisoned(work.touched.into_inner())
}

/// Tracks the length of the touched prefix.
#[derive(Default)]
struct Front {
    state: Mutex<FrontState>,
    moved: Condvar,
}

#[derive(Default)]
struct FrontState {
    /// Everything before this has been touched.
    front: usize,
    /// Touched pieces behind the prefix, as begin and end.
    beyond: BTreeSet<(usize, usize)>,
    /// The number of threads that are touching.
    running: usize,
}

impl Front {
    fn touched(&self, begin: usize, end: usize) {
        let mut state = lock(&self.state);
        state.beyond.insert((begin, end));
        while let Some(&(begin, end)) = state.beyond.first()
            && begin == state.front
        {
            state.front = end;
            state.beyond.pop_first();
        }
        self.moved.notify_all();
    }

    /// Waits until everything before `end` has been touched or no thread is touching any more.
    /// Returns whether everything was touched.
    fn wait_for(&self, end: usize) -> bool {
        let mut state = lock(&self.state);
        while state.front < end && state.running > 0 {
            state = unpoisoned(self.moved.wait(state));
        }
        state.front >= end
    }
}

/// A running touch thread. The drop ends it.
struct Running<'a>(&'a Front);

impl<'a> Running<'a> {
    fn new(front: &'a Front) -> Self {
        lock(&front.state).running += 1;
        Self(front)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).running -= 1;
        self.0.moved.notify_all();
    }
}

/// The state that the threads share.
struct Work<'a> {
    mapping: &'a Mapping,
    page: usize,
    chunk: usize,
    can_populate: bool,
    /// Called with the number of touched bytes. Returns whether to continue.
    advance: &'a (dyn Fn(ByteCount) -> bool + Sync),
    next: AtomicUsize,
    is_over: AtomicBool,
    front: Front,
    touched: Mutex<TouchOutcome>,
}

impl<'a> Work<'a> {
    fn new(
        mapping: &'a Mapping,
        page: Alignment,
        can_populate: bool,
        advance: &'a (dyn Fn(ByteCount) -> bool + Sync),
    ) -> Self {
        let page = ByteCount::new(page.get()).to_usize();
        Self {
            mapping,
            page,
            chunk: CHUNK.max(page),
            can_populate,
            advance,
            next: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
            front: Front::default(),
            touched: Mutex::default(),
        }
    }

    /// The number of threads that have work to do.
    fn thread_count(&self, threads: TouchThreads<'_>) -> usize {
        threads.count.min(self.mapping.length().div_ceil(self.chunk))
    }

    /// Takes chunks on `count` threads, while `beside` runs on this thread. If no thread can be
    /// started, this thread touches all chunks first.
    fn run_with(&self, threads: TouchThreads<'_>, count: usize, beside: impl FnOnce()) {
        let mut refusal = None;
        std::thread::scope(|scope| {
            let mut started = Vec::with_capacity(count);
            for number in 0..count {
                let builder = std::thread::Builder::new().name(format!("terrane-touch-{number}"));
                let running = Running::new(&self.front);
                let run = move || {
                    let _running = running;
                    self.run(threads.cpus);
                };
                match builder.spawn_scoped(scope, run) {
                    Ok(thread) => started.push(thread),
                    Err(error) => {
                        refusal = Some(OsError::from_io("pthread_create", &error));
                        break;
                    }
                }
            }
            if started.is_empty() {
                // The caller's thread keeps its processors, so the named ones are refused.
                if threads.cpus.is_some() {
                    lock(&self.touched).affinity_refusal = refusal;
                }
                self.run(None);
            }
            beside();
            for thread in started {
                // The scope waits for the threads' work. The join also waits until their stacks are
                // freed.
                let _ = thread.join();
            }
        });
        lock(&self.touched).thread_refusal = refusal;
    }

    /// Takes chunks until none is left.
    fn run(&self, cpus: Option<&[u32]>) {
        if let Some(cpus) = cpus
            && let Err(error) = sys::memory::run_on(cpus)
        {
            lock(&self.touched).affinity_refusal.get_or_insert(error);
        }
        while !self.is_over.load(Ordering::Relaxed) {
            let offset = self.next.fetch_add(self.chunk, Ordering::Relaxed);
            let (address, length) = self.mapping.part(offset, self.chunk);
            if length == 0 {
                return;
            }
            if let Err(error) = self.touch_chunk(address, length) {
                self.is_over.store(true, Ordering::Relaxed);
                lock(&self.touched).failure.get_or_insert(error);
                return;
            }
            let bytes = ByteCount::from_usize(length);
            let mut touched = lock(&self.touched);
            touched.bytes = touched.bytes.checked_add(bytes).unwrap_or(touched.bytes);
            drop(touched);
            self.front.touched(offset, offset + length);
            if !(self.advance)(bytes) {
                self.is_over.store(true, Ordering::Relaxed);
            }
        }
    }

    fn touch_chunk(&self, address: NonNull<u8>, length: usize) -> Result<(), OsError> {
        if self.can_populate {
            // SAFETY: the chunk is a part of the mapping.
            return unsafe { sys::memory::populate(address, length) };
        }
        for offset in (0..length).step_by(self.page) {
            let byte = address.as_ptr().wrapping_add(offset);
            // SAFETY: the byte is in the mapping, which is writable. Only the threads here have
            // access to the mapping so far, and each works on other chunks. The byte is zero
            // already.
            unsafe { byte.write_volatile(0) };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_populate_a_byte_of_each_page_is_written() {
        let mapping = Mapping::new(ByteCount::mib(40), Alignment::PAGE, None).unwrap();
        let reported = Mutex::new(0);
        let advance = |bytes: ByteCount| {
            *lock(&reported) += bytes.get();
            true
        };
        Work::new(&mapping, Alignment::PAGE, false, &advance).run(None);
        assert_eq!(*lock(&reported), 40 << 20);
    }

    #[test]
    fn threads_on_cpus_that_do_not_exist_run_elsewhere_and_say_so() {
        let mapping = Mapping::new(ByteCount::mib(40), Alignment::PAGE, None).unwrap();
        let threads = TouchThreads { count: 2, cpus: Some(&[8000]) };
        let touched = touch(&mapping, Alignment::PAGE, threads, &|_| true);
        assert_eq!(touched.bytes, ByteCount::mib(40));
        assert!(touched.affinity_refusal.is_some());
        assert_eq!(touched.failure, None);
    }

    #[test]
    fn what_is_touched_in_any_order_moves_the_front_in_order() {
        let front = Front::default();
        let running = Running::new(&front);
        let at = |front: &Front| lock(&front.state).front;
        for (begin, end, reached) in [(2, 3, 0), (1, 2, 0), (0, 1, 3), (3, 4, 4), (7, 9, 4)] {
            front.touched(begin, end);
            assert_eq!(at(&front), reached);
        }
        assert!(front.wait_for(4));
        drop(running);
        assert!(!front.wait_for(5), "no thread touches it");
    }

    #[test]
    fn steps_are_reached_in_order_and_the_last_is_the_end() {
        let mapping = Mapping::new(ByteCount::mib(100), Alignment::PAGE, None).unwrap();
        for count in [1, 3] {
            let threads = TouchThreads { count, cpus: None };
            let mut steps = Vec::new();
            let mut reached = |prefix: ByteCount| steps.push(prefix.get() >> 20);
            let step = ByteCount::mib(40);
            let touched = touch_from_the_front(
                &mapping,
                Alignment::PAGE,
                threads,
                step,
                &|_| true,
                &mut reached,
            );
            assert_eq!(steps, [40, 80, 100]);
            assert_eq!(touched.bytes, ByteCount::mib(100));
        }
    }

    #[test]
    fn touching_stops_when_it_is_told_to() {
        let mapping = Mapping::new(ByteCount::mib(100), Alignment::PAGE, None).unwrap();
        let threads = TouchThreads { count: 1, cpus: None };
        let mut steps = 0;
        let touched = touch_from_the_front(
            &mapping,
            Alignment::PAGE,
            threads,
            ByteCount::mib(64),
            &|_| false,
            &mut |_| steps += 1,
        );
        assert_eq!((touched.bytes, steps), (ByteCount::mib(16), 0));
    }
}
