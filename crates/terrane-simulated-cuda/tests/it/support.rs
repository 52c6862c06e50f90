//! The functions of the driver, called like by a program.

use terrane_simulated_cuda::exports::*;
use terrane_simulated_cuda::{Attached, Config, Policy, Session};

pub const NON_BLOCKING: u32 = 1;
pub const INVALID_VALUE: u32 = 1;
pub const NOT_READY: u32 = 600;
pub const ILLEGAL_ADDRESS: u32 = 700;

/// Every policy, and the random policy with several seeds.
pub fn configs() -> impl Iterator<Item = Config> {
    let fixed = [Policy::Eager, Policy::Lazy];
    let fixed = fixed.map(|policy| Config { policy, ..small() });
    fixed.into_iter().chain((0..24).map(|seed| Config { seed, ..small() }))
}

/// Without the background thread, so that a test with one thread gets the same run each time.
pub fn small() -> Config {
    Config { memory: 16 << 20, background: false, ..Config::default() }
}

pub fn lazy() -> Config {
    Config { policy: Policy::Lazy, ..small() }
}

pub fn ok(code: u32) {
    assert_eq!(code, 0);
}

/// A driver with its first device's primary context current on this thread.
pub struct Cuda {
    pub context: u64,
    // Dropped before the session.
    _attached: Attached,
    pub session: Session,
}

impl Cuda {
    pub fn new(config: Config) -> Self {
        let session = Session::start(config).unwrap();
        let attached = session.attach();
        let context = make_current(0);
        Self { context, _attached: attached, session }
    }
}

/// Retains a device's primary context and makes it current.
pub fn make_current(device: i32) -> u64 {
    let mut context = 0;
    // SAFETY: one handle is written.
    ok(unsafe { cuDevicePrimaryCtxRetain(Out::to(&mut context), device) });
    // SAFETY: no pointers.
    ok(unsafe { cuCtxSetCurrent(context) });
    context
}

pub fn stream(flags: u32) -> u64 {
    let mut stream = 0;
    // SAFETY: one handle is written.
    ok(unsafe { cuStreamCreate(Out::to(&mut stream), flags) });
    stream
}

pub fn event() -> u64 {
    let mut event = 0;
    // SAFETY: one handle is written.
    ok(unsafe { cuEventCreate(Out::to(&mut event), 0) });
    event
}

pub fn record(event: u64, stream: u64) {
    // SAFETY: no pointers.
    ok(unsafe { cuEventRecord(event, stream) });
}

pub fn wait_for(stream: u64, event: u64) {
    // SAFETY: no pointers.
    ok(unsafe { cuStreamWaitEvent(stream, event, 0) });
}

pub fn synchronize(stream: u64) -> u32 {
    // SAFETY: no pointers.
    unsafe { cuStreamSynchronize(stream) }
}

pub fn allocate(length: usize) -> u64 {
    let mut address = 0;
    // SAFETY: one address is written.
    ok(unsafe { cuMemAlloc_v2(Out::to(&mut address), length) });
    address
}

/// Pinned memory that the driver allocated, as host bytes.
pub struct Pinned {
    pub address: u64,
    length: usize,
}

impl Pinned {
    pub fn new(length: usize) -> Self {
        let mut address = 0;
        // SAFETY: one address is written.
        ok(unsafe { cuMemHostAlloc(Out::to(&mut address), length, 0) });
        Self { address, length }
    }

    /// Its present bytes, which a copy may be changing.
    pub fn bytes(&self) -> Vec<u8> {
        let start = std::ptr::with_exposed_provenance::<u8>(usize::try_from(self.address).unwrap());
        let each = (0..self.length).map(|index| start.wrapping_add(index));
        // SAFETY: within the allocation; the simulation may be writing it, byte by byte.
        each.map(|at| unsafe { at.read_volatile() }).collect()
    }

    pub fn fill(&self, value: u8) {
        let start =
            std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(self.address).unwrap());
        // SAFETY: within the allocation, which no copy uses now.
        unsafe { start.write_bytes(value, self.length) };
    }
}

pub fn copy(to: u64, from: u64, length: usize, stream: u64) -> u32 {
    // SAFETY: the tests keep memory alive until the copy has run, or test the result if not.
    unsafe { cuMemcpyAsync(to, from, length, stream) }
}

pub fn fill(to: u64, value: u8, length: usize, stream: u64) -> u32 {
    // SAFETY: as for a copy.
    unsafe { cuMemsetD8Async(to, value, length, stream) }
}

/// Reads device memory by a copy with a wait.
pub fn read(from: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0_u8; length];
    let to = u64::try_from(bytes.as_mut_ptr().expose_provenance()).unwrap();
    // SAFETY: the buffer has that length.
    ok(unsafe { cuMemcpyDtoH_v2(to, from, length) });
    bytes
}

pub fn write(to: u64, bytes: &[u8]) {
    let from = u64::try_from(bytes.as_ptr().expose_provenance()).unwrap();
    // SAFETY: the buffer has that length.
    ok(unsafe { cuMemcpyHtoD_v2(to, from, bytes.len()) });
}

pub fn count(sort: u32) -> u64 {
    let mut count = 0;
    // SAFETY: one number is written.
    ok(unsafe { terraneSimulatedCount(sort, Out::to(&mut count)) });
    count
}

pub fn hold(stream: u64) {
    // SAFETY: no pointers.
    ok(unsafe { terraneSimulatedHold(stream) });
}

pub fn release(stream: u64) {
    // SAFETY: no pointers.
    ok(unsafe { terraneSimulatedRelease(stream) });
}

pub fn limit(most: u64) {
    // SAFETY: no pointers.
    ok(unsafe { terraneSimulatedLimit(most) });
}

pub fn is_done(event: u64) -> bool {
    // SAFETY: no pointers.
    match unsafe { cuEventQuery(event) } {
        0 => true,
        NOT_READY => false,
        code => panic!("{code}"),
    }
}
