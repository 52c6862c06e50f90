//! What a test asks of the simulated CUDA driver, where that is the one which is loaded.

use std::ffi::{CString, c_char, c_void};

use libloading::Library;

/// The simulated driver (`terrane-simulated-cuda`) of this process.
#[derive(Debug)]
pub struct SimulatedCuda(Library);

/// A sort of things that the simulated driver counts.
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

/// What the simulated driver says of memory that was allocated at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pieces {
    /// That each 2 MiB were mapped to their place beside the ones before, as PyTorch's expandable
    /// segments are.
    Mapped,
    /// That each 2 MiB are an allocation of their own, beside the others by chance.
    Neighbours,
}

impl SimulatedCuda {
    /// The driver, if there is one in this process and it is simulated. It has to be initialised
    /// before it is asked anything.
    #[must_use]
    pub fn find() -> Option<Self> {
        // SAFETY: the driver's initialisers are harmless, simulated or not.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: only whether it is there is asked.
        let is_simulated = unsafe { library.get::<*const ()>("terraneSimulatedCount") }.is_ok();
        is_simulated.then_some(Self(library))
    }

    /// The call of `function` (`"cuMemAlloc_v2"`) after `spared` further ones answers with `code`.
    pub fn fail(&self, function: &str, spared: u64, code: u32) {
        let function = CString::new(function).expect("a name without a zero byte");
        let call = self.function::<unsafe extern "C" fn(*const c_char, u64, u32) -> u32>(
            "terraneSimulatedFail",
        );
        // SAFETY: the name ends with a zero byte.
        succeeded(unsafe { call(function.as_ptr(), spared, code) });
    }

    /// Every call of `function` answers with `code`, until that is [forgiven](Self::forgive).
    pub fn refuse(&self, function: &str, code: u32) {
        let function = CString::new(function).expect("a name without a zero byte");
        let call = self
            .function::<unsafe extern "C" fn(*const c_char, u32) -> u32>("terraneSimulatedRefuse");
        // SAFETY: the name ends with a zero byte.
        succeeded(unsafe { call(function.as_ptr(), code) });
    }

    /// Loses the primary context of a device with `code`, at the operation of its streams after
    /// `spared` further ones.
    pub fn lose(&self, device: i32, spared: u64, code: u32) {
        let call =
            self.function::<unsafe extern "C" fn(i32, u64, u32) -> u32>("terraneSimulatedLose");
        // SAFETY: no pointers.
        succeeded(unsafe { call(device, spared, code) });
    }

    /// Forgets what was to fail and has not failed yet; answers how much that was.
    pub fn forgive(&self) -> u64 {
        let mut count = 0;
        let call =
            self.function::<unsafe extern "C" fn(*mut u64) -> u32>("terraneSimulatedForgive");
        // SAFETY: one number is written.
        succeeded(unsafe { call(&raw mut count) });
        count
    }

    /// Says from now on that the device's memory which was allocated at an address is in pieces.
    pub fn in_pieces(&self, address: u64, pieces: Pieces) {
        let sort = match pieces {
            Pieces::Mapped => 1,
            Pieces::Neighbours => 2,
        };
        let call = self.function::<unsafe extern "C" fn(u64, u32) -> u32>("terraneSimulatedPieces");
        // SAFETY: no pointers.
        succeeded(unsafe { call(address, sort) });
    }

    /// Holds a stream's work back until the answer drops. The thread that has the answer must not
    /// wait for it meanwhile, nor free memory of its context: that waits for all streams.
    pub fn hold(&self, stream: *mut c_void) -> Held<'_> {
        self.on_stream("terraneSimulatedHold", stream);
        Held { driver: self, stream }
    }

    /// Does up to `most` steps of streams that can go on; answers how many there were.
    pub fn step(&self, most: u64) -> u64 {
        let mut done = 0;
        let call =
            self.function::<unsafe extern "C" fn(u64, *mut u64) -> u32>("terraneSimulatedStep");
        // SAFETY: one number is written.
        succeeded(unsafe { call(most, &raw mut done) });
        done
    }

    /// How often this thread has called a function of the driver (`"cuMemAlloc_v2"`); all of them,
    /// where none is named.
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

    /// How many there are of one sort.
    pub fn count(&self, sort: Live) -> u64 {
        let number = match sort {
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
        // SAFETY: the handle is a number to the simulated driver, which checks it.
        succeeded(unsafe { call(stream) });
    }

    fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: each caller names the type that the simulated driver's function has.
        *unsafe { self.0.get::<F>(name) }.expect("a function of the simulated driver")
    }
}

/// A stream whose work is held back, for as long as this lives.
#[derive(Debug)]
pub struct Held<'a> {
    driver: &'a SimulatedCuda,
    stream: *mut c_void,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.driver.on_stream("terraneSimulatedLetGo", self.stream);
    }
}

#[track_caller]
fn succeeded(code: u32) {
    assert_eq!(code, 0, "the simulated driver refuses");
}
