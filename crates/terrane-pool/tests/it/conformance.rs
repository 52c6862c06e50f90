//! Runs the testkit's conformance suite over every upstream and every stack of adaptors. It also
//! tests typed exhaustion that leaks nothing, use by several threads, and the absence of leaks
//! after each rule.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::thread;

use terrane_core::{Allocate, BoxedCause, ByteCount, Location, Memory, RegionRequest, StorageKind};
use terrane_testkit::conformance::{AllocatorFixture, check_allocator};
use terrane_testkit::pattern::{InProcess, PieceAccess};

/// A source under test, with the data that the suite needs.
pub struct Fixture<A> {
    pub source: A,
    /// The number of live blocks of the backend.
    pub live_blocks: Box<dyn Fn() -> u64 + Send + Sync>,
    /// Whether a request of 2^40 bytes exceeds its capacity.
    pub is_bounded: bool,
}

/// Applies every rule to fresh fixtures.
pub fn check<A>(name: &str, fixture: impl Fn() -> Fixture<A>)
where
    A: Allocate + Send + Sync,
{
    let suite =
        Suite { fixture: &fixture, backends: Mutex::default(), imagined: Imagined::default() };
    check_allocator(&suite);
    let backends = suite.backends.into_inner().unwrap_or_else(PoisonError::into_inner);
    let live: u64 = backends.iter().map(|live_blocks| live_blocks()).sum();
    assert_eq!(live, 0, "{name}: leak");
    refusals_leave_nothing_behind(name, fixture());
    threads_share_a_source(name, fixture());
}

/// The fixture in the testkit's form.
struct Suite<'fixture, F> {
    fixture: &'fixture F,
    /// The live blocks of the backends of all sources.
    backends: Mutex<Vec<Box<dyn Fn() -> u64 + Send + Sync>>>,
    imagined: Imagined,
}

impl<A: Allocate, F: Fn() -> Fixture<A>> AllocatorFixture for Suite<'_, F> {
    type Allocator = A;

    fn allocator(&self) -> A {
        let Fixture { source, live_blocks, .. } = (self.fixture)();
        self.backends.lock().unwrap_or_else(PoisonError::into_inner).push(live_blocks);
        source
    }

    fn access(&self) -> &dyn PieceAccess {
        &self.imagined
    }

    /// A source may keep freed blocks. [`check`] tests that none is left after the sources.
    fn live(&self, _: &A) -> Option<u64> {
        None
    }
}

/// Host memory, and bytes for a simulated device, which has addresses but no memory.
#[derive(Default)]
struct Imagined(Mutex<HashMap<u64, Box<[u8; PAGE]>>>);

/// The size of the parts of an [`Imagined`] device.
const PAGE: usize = 4096;

impl Imagined {
    /// Calls `on_part` with each part of `length` bytes at `address` that is in one page: the bytes
    /// of the page, and their position in the whole.
    fn each_part(
        &self,
        address: u64,
        length: usize,
        mut on_part: impl FnMut(&mut [u8], Range<usize>),
    ) {
        let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = 0;
        while done < length {
            let at = address + done as u64;
            let begin = usize::try_from(at % PAGE as u64).unwrap();
            let end = (begin + length - done).min(PAGE);
            let page = pages.entry(at / PAGE as u64).or_insert_with(|| Box::new([0; PAGE]));
            on_part(&mut page[begin..end], done..done + end - begin);
            done += end - begin;
        }
    }
}

impl PieceAccess for Imagined {
    unsafe fn read(&self, at: Location, bytes: &mut [u8]) -> Result<(), BoxedCause> {
        let Location::Device { address, .. } = at else {
            // SAFETY: by the caller's promise.
            return unsafe { InProcess.read(at, bytes) };
        };
        self.each_part(address.get(), bytes.len(), |part, whole| {
            bytes[whole].copy_from_slice(part)
        });
        Ok(())
    }

    unsafe fn write(&self, at: Location, bytes: &[u8]) -> Result<(), BoxedCause> {
        let Location::Device { address, .. } = at else {
            // SAFETY: by the caller's promise.
            return unsafe { InProcess.write(at, bytes) };
        };
        self.each_part(address.get(), bytes.len(), |part, whole| {
            part.copy_from_slice(&bytes[whole])
        });
        Ok(())
    }
}

fn request(bytes: u64) -> RegionRequest {
    RegionRequest::new(ByteCount::new(bytes)).labelled("conformance")
}

fn refusals_leave_nothing_behind<A: Allocate>(name: &str, fixture: Fixture<A>) {
    let Fixture { source, live_blocks, is_bounded } = fixture;
    if !is_bounded {
        drop(source);
        assert_eq!(live_blocks(), 0, "{name}: leak");
        return;
    }
    let held = source.allocate(&request(64)).unwrap();
    let before = live_blocks();
    for _ in 0..100 {
        let error = source.allocate(&request(1 << 40)).map(drop).unwrap_err();
        assert!(error.is_exhaustion(), "{name}: {error}");
        assert!(!error.to_string().is_empty());
    }
    assert_eq!(live_blocks(), before, "{name}: a refusal leaked memory");
    assert!(source.allocate(&request(64)).is_ok(), "{name}: exhausted by refusals");
    drop(held);
    assert!(source.allocate(&request(64)).is_ok(), "{name}");
    drop(source);
    assert_eq!(live_blocks(), 0, "{name}: leak");
}

fn threads_share_a_source<A: Allocate + Send + Sync>(name: &str, fixture: Fixture<A>) {
    let Fixture { source, live_blocks, .. } = fixture;
    thread::scope(|scope| {
        let threads = [0, 1, 2_u8].map(|thread| {
            let source = &source;
            scope.spawn(move || {
                let mut live = Vec::new();
                for round in 0..100_u64 {
                    let memory = source.allocate(&request(1 + round * 13 % 500)).unwrap();
                    fill(&memory, thread);
                    live.push(memory);
                    if live.len() > 4 {
                        assert!(holds(&live.swap_remove(0), thread), "{name}: shared bytes");
                    }
                }
            })
        });
        // The end of a scope does not wait for the destructors of thread-locals. A join does.
        for thread in threads {
            thread.join().unwrap();
        }
    });
    drop(source);
    assert_eq!(live_blocks(), 0, "{name}: leak");
}

#[expect(clippy::mut_from_ref, reason = "the suite makes one slice at a time")]
fn host_bytes(memory: &impl Memory) -> Option<&mut [u8]> {
    let Location::Host(address) = memory.location() else { return None };
    assert!(matches!(memory.kind(), StorageKind::System | StorageKind::Pinned));
    // SAFETY: the suite owns the memory, which is valid for its length and initialised, and makes
    // one slice at a time.
    Some(unsafe { std::slice::from_raw_parts_mut(address.as_ptr(), memory.length().to_usize()) })
}

fn fill(memory: &impl Memory, byte: u8) {
    if let Some(bytes) = host_bytes(memory) {
        bytes.fill(byte);
    }
}

fn holds(memory: &impl Memory, byte: u8) -> bool {
    host_bytes(memory).is_none_or(|bytes| bytes.iter().all(|&b| b == byte))
}
