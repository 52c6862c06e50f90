//! The entry of every function: the driver and the context that a thread calls, and the count of
//! its calls.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::capture::CaptureMode;
use crate::code::{Code, Outcome};
use crate::config::Config;
use crate::session::start;
use crate::simulator::Simulator;
use crate::state::Caller;

/// The process's simulated driver, created by the first call of `cuInit`.
static SIMULATOR: OnceLock<Result<Arc<Simulator>, Code>> = OnceLock::new();

thread_local! {
    /// The contexts on this thread's stack, the current one last.
    pub(super) static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// Whether this thread is running a host function for a stream.
    static IS_CALLBACK: Cell<bool> = const { Cell::new(false) };
    /// The driver that this thread calls instead of the process's.
    static ATTACHED: RefCell<Option<Arc<Simulator>>> = const { RefCell::new(None) };
    /// The number of this thread's calls of each function.
    static CALLS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
    /// The effect of this thread's calls on captures.
    pub(super) static CAPTURE_MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
    /// This thread's number.
    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// Declares functions of the driver. Each returns a code. The body returns an [`Outcome`], and gets
/// the simulator and the caller.
macro_rules! exports {
    ($(
        $(#[$attribute:meta])*
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) |$simulator:ident, $caller:ident|
        $body:block
    )*) => {$(
        $(#[$attribute])*
        ///
        /// # Safety
        ///
        /// As the driver's documentation states: pointers are null, or valid for the bytes that are
        /// read or written there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            $crate::exports::entry::enter(stringify!($name), |$simulator, $caller| $body)
        }
    )*

        /// The function of this name, if this module has it.
        pub(super) fn symbol(name: &str) -> Option<*const ()> {
            match name {
                $(stringify!($name) => Some($name as *const ()),)*
                _ => None,
            }
        }
    };
}
pub(crate) use exports;

/// Runs the body of a function, after it has looked up the thread's context. Faults that a test
/// requested come first.
pub(crate) fn enter(name: &'static str, body: impl FnOnce(&Simulator, Caller) -> Outcome) -> u32 {
    // A thread that is exiting has no count any more.
    let _ = CALLS.try_with(|calls| *calls.borrow_mut().entry(name).or_default() += 1);
    let outcome = (|| {
        if IS_CALLBACK.get() {
            // "The host function must not make any CUDA API calls."
            return Err(Code::NOT_PERMITTED);
        }
        let simulator = simulator(matches!(name, "cuInit"))?;
        let caller = caller();
        simulator.with(|state| {
            state.faults.call(name)?;
            state.disturb(name, caller.thread, CAPTURE_MODE.get())
        })?;
        body(&simulator, caller)
    })();
    outcome.map_or_else(|code| code.0, |()| 0)
}

/// The number of this thread's calls of a driver function; of all functions, if none is named.
pub(super) fn calls_of(name: Option<&str>) -> u64 {
    let is_counted = |called: &str| match name {
        Some(name) => called == name,
        None => !called.starts_with("terrane"),
    };
    CALLS.with_borrow(|calls| {
        calls.iter().filter(|(called, _)| is_counted(called)).map(|(_, count)| count).sum()
    })
}

pub(super) fn caller() -> Caller {
    let context = CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0));
    Caller { context, thread: THREAD.with(|thread| *thread) }
}

fn simulator(may_create: bool) -> Outcome<Arc<Simulator>> {
    if let Some(attached) = ATTACHED.with_borrow(Option::clone) {
        return Ok(attached);
    }
    let created = if may_create {
        SIMULATOR.get_or_init(create)
    } else {
        SIMULATOR.get().ok_or(Code::NOT_INITIALIZED)?
    };
    created.clone()
}

fn create() -> Outcome<Arc<Simulator>> {
    let config = Config::from_env().map_err(|error| {
        #[expect(clippy::print_stderr, reason = "a code alone would not name the misspelt setting")]
        {
            eprintln!("{error}");
        }
        Code::INVALID_VALUE
    })?;
    // Its threads end with the process, like the driver's.
    start(config).map(|(simulator, _threads)| simulator)
}

/// Makes this thread call another driver than the process's, with none of its contexts current.
/// Returns the previous driver and the previous context stack.
pub(crate) fn attach(
    simulator: Option<Arc<Simulator>>,
    stack: Vec<u64>,
) -> (Option<Arc<Simulator>>, Vec<u64>) {
    (ATTACHED.replace(simulator), CURRENT.replace(stack))
}

/// Records that this thread runs host functions for streams, and must not call the driver.
pub(crate) fn mark_as_callback() {
    IS_CALLBACK.set(true);
}

/// Returns the number of a device that exists.
pub(super) fn known(simulator: &Simulator, device: i32) -> Result<u32, Code> {
    let device = u32::try_from(device).map_err(|_| Code::INVALID_DEVICE)?;
    simulator.with(|state| state.device(device).map(|_| device))
}
