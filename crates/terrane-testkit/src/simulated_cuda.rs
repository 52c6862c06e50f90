//! Controls the simulated CUDA driver, if that is the loaded one.

use std::ffi::{CString, c_char, c_void};

use libloading::Library;

/// The simulated driver (`terrane-simulated-cuda`) of this process.
#[derive(Debug)]
pub struct SimulatedCuda(Library);

/// A kind of resource that the simulated driver counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Contexts.
    Contexts,
    /// Streams that were created.
    Streams,
    /// Events.
    Events,
    /// Allocations of device memory.
    Allocations,
    /// Spans of pinned memory, allocated or registered.
    Pinned,
    /// Pools that were created.
    Pools,
    /// Modules.
    Modules,
    /// Operations of streams that have not run.
    Operations,
}

/// The simulated driver's report of memory that was allocated at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// Each 2 MiB were mapped next to the previous ones, like PyTorch's expandable segments.
    Mapped,
    /// Each 2 MiB are a separate allocation, adjacent to the others by chance.
    Neighbours,
}

impl SimulatedCuda {
    /// The driver, if this process has one and it is simulated. It must be initialised before other
    /// calls.
    #[must_use]
    pub fn find() -> Option<Self> {
        // SAFETY: the driver's initialisers are harmless, simulated or not.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: only the existence of the symbol is checked.
        let is_simulated = unsafe { library.get::<*const ()>("terraneSimulatedCount") }.is_ok();
        is_simulated.then_some(Self(library))
    }

    /// Like [`find`](Self::find). With a real device, prints that the test is skipped, and returns
    /// `None`.
    #[expect(clippy::print_stderr, reason = "skipped tests are reported on standard error")]
    pub fn find_or_skip(test: &str) -> Option<Self> {
        let driver = Self::find();
        if driver.is_none() {
            eprintln!("skipped: {test}: a simulated device needed, this one is real");
        }
        driver
    }

    /// Makes the call of `function` (`"cuMemAlloc_v2"`) after `spared` further calls return `code`.
    pub fn fail(&self, function: &str, spared: u64, code: u32) {
        let function = CString::new(function).expect("a name without a zero byte");
        let call = self.function::<unsafe extern "C" fn(*const c_char, u64, u32) -> u32>(
            "terraneSimulatedFail",
        );
        // SAFETY: the name ends with a zero byte.
        succeeded(unsafe { call(function.as_ptr(), spared, code) });
    }

    /// Makes every call of `function` return `code`, until [`clear_faults`](Self::clear_faults).
    pub fn refuse(&self, function: &str, code: u32) {
        let function = CString::new(function).expect("a name without a zero byte");
        let call = self
            .function::<unsafe extern "C" fn(*const c_char, u32) -> u32>("terraneSimulatedRefuse");
        // SAFETY: the name ends with a zero byte.
        succeeded(unsafe { call(function.as_ptr(), code) });
    }

    /// Loses the primary context of a device with `code`, at the operation of its streams after
    /// `spared` further operations.
    pub fn lose(&self, device: i32, spared: u64, code: u32) {
        let call =
            self.function::<unsafe extern "C" fn(i32, u64, u32) -> u32>("terraneSimulatedLose");
        // SAFETY: no pointers.
        succeeded(unsafe { call(device, spared, code) });
    }

    /// Removes all faults that have not occurred yet, and returns their number.
    pub fn clear_faults(&self) -> u64 {
        let mut count = 0;
        let call =
            self.function::<unsafe extern "C" fn(*mut u64) -> u32>("terraneSimulatedClearFaults");
        // SAFETY: one number is written.
        succeeded(unsafe { call(&raw mut count) });
        count
    }

    /// Makes the driver report the device memory that was allocated at an address as several
    /// pieces.
    pub fn in_pieces(&self, address: u64, pieces: Pieces) {
        let kind = match pieces {
            Pieces::Mapped => 1,
            Pieces::Neighbours => 2,
        };
        let call = self.function::<unsafe extern "C" fn(u64, u32) -> u32>("terraneSimulatedPieces");
        // SAFETY: no pointers.
        succeeded(unsafe { call(address, kind) });
    }

    /// Holds a stream's work back until the returned value drops. The test's thread must not wait
    /// for the stream before, and must not free memory of its context, which waits for all streams.
    pub fn hold(&self, stream: *mut c_void) -> Held<'_> {
        self.on_stream("terraneSimulatedHold", stream);
        Held { driver: self, stream }
    }

    /// Begins the capture of a stream into a graph, in the default mode. Makes the primary context
    /// of the stream's device current.
    pub fn begin_capture(&self, device: i32, stream: *mut c_void) {
        const GLOBAL: u32 = 0;
        let mut context = std::ptr::null_mut();
        let retain = self.function::<unsafe extern "C" fn(*mut *mut c_void, i32) -> u32>(
            "cuDevicePrimaryCtxRetain",
        );
        // SAFETY: one handle is written.
        succeeded(unsafe { retain(&raw mut context, device) });
        let bind = self.function::<unsafe extern "C" fn(*mut c_void) -> u32>("cuCtxSetCurrent");
        // SAFETY: the simulated driver treats the handle as a number, and checks it.
        succeeded(unsafe { bind(context) });
        let release =
            self.function::<unsafe extern "C" fn(i32) -> u32>("cuDevicePrimaryCtxRelease_v2");
        // SAFETY: no pointers. The stream's owner retains the context as well.
        succeeded(unsafe { release(device) });
        let call =
            self.function::<unsafe extern "C" fn(usize, u32) -> u32>("cuStreamBeginCapture_v2");
        // SAFETY: the simulated driver treats the handle as a number, and checks it.
        succeeded(unsafe { call(stream.addr(), GLOBAL) });
    }

    /// Ends the capture of a stream, and returns the driver's code: zero if it is valid.
    #[must_use]
    pub fn end_capture(&self, stream: *mut c_void) -> u32 {
        let mut graph = std::ptr::null_mut();
        let call = self
            .function::<unsafe extern "C" fn(usize, *mut *mut c_void) -> u32>("cuStreamEndCapture");
        // SAFETY: the simulated driver treats the handle as a number, and checks it; one handle is
        // written.
        unsafe { call(stream.addr(), &raw mut graph) }
    }

    /// Lets at most `most` further operations of all streams run, until the returned value drops. The
    /// test's thread must not wait for other work before.
    pub fn limit(&self, most: u64) -> Limited<'_> {
        self.set_limit(most);
        Limited(self)
    }

    fn set_limit(&self, most: u64) {
        let call = self.function::<unsafe extern "C" fn(u64) -> u32>("terraneSimulatedLimit");
        // SAFETY: no pointers.
        succeeded(unsafe { call(most) });
    }

    /// Runs up to `most` steps of streams that are ready, and returns their number.
    pub fn step(&self, most: u64) -> u64 {
        let mut done = 0;
        let call =
            self.function::<unsafe extern "C" fn(u64, *mut u64) -> u32>("terraneSimulatedStep");
        // SAFETY: one number is written.
        succeeded(unsafe { call(most, &raw mut done) });
        done
    }

    /// The number of this thread's calls of a driver function (`"cuMemAlloc_v2"`), or of all
    /// functions.
    pub fn calls(&self, function: Option<&str>) -> u64 {
        let name = function.map(|name| CString::new(name).expect("a name without a zero byte"));
        let name = name.as_deref().map_or(std::ptr::null(), std::ffi::CStr::as_ptr);
        let mut count = 0;
        let call = self.function::<unsafe extern "C" fn(*const c_char, *mut u64) -> u32>(
            "terraneSimulatedCalls",
        );
        // SAFETY: the name is null or ends with a zero byte, and one number is written.
        succeeded(unsafe { call(name, &raw mut count) });
        count
    }

    /// The number of resources of one kind.
    pub fn count(&self, kind: Live) -> u64 {
        let number = match kind {
            Live::Contexts => 0,
            Live::Streams => 1,
            Live::Events => 2,
            Live::Allocations => 3,
            Live::Pinned => 4,
            Live::Pools => 5,
            Live::Modules => 6,
            Live::Operations => 7,
        };
        let mut count = 0;
        let call =
            self.function::<unsafe extern "C" fn(u32, *mut u64) -> u32>("terraneSimulatedCount");
        // SAFETY: one number is written.
        succeeded(unsafe { call(number, &raw mut count) });
        count
    }

    fn on_stream(&self, name: &str, stream: *mut c_void) {
        let call = self.function::<unsafe extern "C" fn(*mut c_void) -> u32>(name);
        // SAFETY: the simulated driver treats the handle as a number, and checks it.
        succeeded(unsafe { call(stream) });
    }

    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: each caller gives the type of the simulated driver's function.
        *unsafe { self.0.get::<F>(name) }.expect("a function of the simulated driver")
    }
}

/// A stream whose work is held back while this value lives.
#[derive(Debug)]
pub struct Held<'a> {
    driver: &'a SimulatedCuda,
    stream: *mut c_void,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.driver.on_stream("terraneSimulatedRelease", self.stream);
    }
}

#[track_caller]
fn succeeded(code: u32) {
    assert_eq!(code, 0, "the simulated driver refuses");
}

/// A limit of operations, which ends when it drops.
#[derive(Debug)]
pub struct Limited<'a>(&'a SimulatedCuda);

impl Drop for Limited<'_> {
    fn drop(&mut self) {
        self.0.set_limit(u64::MAX);
    }
}
