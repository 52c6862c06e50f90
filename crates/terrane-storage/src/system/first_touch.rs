//! Making the kernel find and zero pages before they are used, with several threads.

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use terrane_core::{Alignment, ByteCount, OsError};

use super::mapping::Mapping;
use super::progress::Progress;
use crate::sys;

/// What a thread takes at a time: small enough that progress moves and threads end together,
/// large enough that the calls do not count, and a multiple of the 2 MiB huge page.
const CHUNK: usize = 16 << 20;

/// Who touches, and on which CPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Crew<'a> {
    pub(super) threads: usize,
    /// CPUs that the threads are kept on; none means any.
    pub(super) cpus: Option<&'a [u32]>,
}

/// How touching went.
#[derive(Debug, Default)]
pub(super) struct Touched {
    /// The bytes that were touched.
    pub(super) bytes: ByteCount,
    /// Why the kernel gave no pages, if it did not.
    pub(super) failure: Option<OsError>,
    /// Why there were fewer threads than asked for, if there were.
    pub(super) thread_refusal: Option<OsError>,
    /// Why threads ran on other CPUs than asked for, if they did.
    pub(super) affinity_refusal: Option<OsError>,
}

/// Touches all of `mapping`, whose pages are of size `page`, unless `progress` is cancelled or
/// the kernel runs out of pages.
pub(super) fn touch(
    mapping: &Mapping,
    page: Alignment,
    crew: Crew<'_>,
    progress: &Progress,
) -> Touched {
    let page = ByteCount::new(page.get()).to_usize();
    let work = Work {
        mapping,
        page,
        chunk: CHUNK.max(page),
        can_populate: sys::memory::can_populate(),
        progress,
        next: AtomicUsize::new(0),
        is_over: AtomicBool::new(false),
        touched: Mutex::default(),
    };
    let threads = crew.threads.min(mapping.length().div_ceil(work.chunk));
    if threads <= 1 && crew.cpus.is_none() {
        work.run(None);
    } else {
        let mut refusal = None;
        std::thread::scope(|scope| {
            let mut started = Vec::with_capacity(threads);
            for number in 0..threads {
                let builder = std::thread::Builder::new().name(format!("terrane-touch-{number}"));
                match builder.spawn_scoped(scope, || work.run(crew.cpus)) {
                    Ok(thread) => started.push(thread),
                    Err(error) => {
                        refusal = Some(OsError::from_io("pthread_create", &error));
                        break;
                    }
                }
            }
            if started.is_empty() {
                work.run(None);
            }
            for thread in started {
                // The scope waits for their work, this for their stacks to be given back.
                let _ = thread.join();
            }
        });
        lock(&work.touched).thread_refusal = refusal;
    }
    work.touched.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// What the threads share.
struct Work<'a> {
    mapping: &'a Mapping,
    page: usize,
    chunk: usize,
    can_populate: bool,
    progress: &'a Progress,
    next: AtomicUsize,
    is_over: AtomicBool,
    touched: Mutex<Touched>,
}

impl Work<'_> {
    /// Takes chunks until none is left.
    fn run(&self, cpus: Option<&[u32]>) {
        if let Some(cpus) = cpus
            && let Err(error) = sys::memory::run_on(cpus)
        {
            lock(&self.touched).affinity_refusal.get_or_insert(error);
        }
        while !self.is_over.load(Ordering::Relaxed) && !self.progress.is_cancelled() {
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
            self.progress.advance(bytes);
            let mut touched = lock(&self.touched);
            touched.bytes = touched.bytes.checked_add(bytes).unwrap_or(touched.bytes);
        }
    }

    fn touch_chunk(&self, address: NonNull<u8>, length: usize) -> Result<(), OsError> {
        if self.can_populate {
            // SAFETY: the chunk is a part of the mapping.
            return unsafe { sys::memory::populate(address, length) };
        }
        for offset in (0..length).step_by(self.page) {
            let byte = address.as_ptr().wrapping_add(offset);
            // SAFETY: the byte is in the mapping, which is writable and which nobody has seen
            // yet, but for the other threads here, whose chunks are others. It is zero already.
            unsafe { byte.write_volatile(0) };
        }
        Ok(())
    }
}

/// No thread panics while it holds the lock, and what it guards is whole at any time.
fn lock(touched: &Mutex<Touched>) -> std::sync::MutexGuard<'_, Touched> {
    touched.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_populate_a_byte_of_each_page_is_written() {
        let mapping = Mapping::new(ByteCount::mib(40), Alignment::PAGE, None).unwrap();
        let progress = Progress::default();
        let work = Work {
            mapping: &mapping,
            page: 4096,
            chunk: CHUNK,
            can_populate: false,
            progress: &progress,
            next: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
            touched: Mutex::default(),
        };
        work.run(None);
        assert_eq!(progress.ready(), ByteCount::mib(40));
    }

    #[test]
    fn threads_on_cpus_that_do_not_exist_run_elsewhere_and_say_so() {
        let mapping = Mapping::new(ByteCount::mib(40), Alignment::PAGE, None).unwrap();
        let crew = Crew { threads: 2, cpus: Some(&[8000]) };
        let touched = touch(&mapping, Alignment::PAGE, crew, &Progress::default());
        assert_eq!(touched.bytes, ByteCount::mib(40));
        assert!(touched.affinity_refusal.is_some());
        assert_eq!(touched.failure, None);
    }
}
