//! The driver's functions, by the names and with the arguments that its documentation gives them.
//!
//! Handles are numbers of 64 bits here, which C passes as it passes the pointers that they are in
//! `cuda.h`. Pointers are [`Out`] and [`In`].
#![allow(non_snake_case, reason = "the names are the driver's, as its documentation has them")]

mod contexts;
mod copies;
mod devices;
mod events;
mod memory;
mod modules;
mod pools;
mod simulation;
mod streams;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

pub use contexts::*;
pub use copies::*;
pub use devices::*;
pub use events::*;
pub use memory::*;
pub use modules::*;
pub use pools::*;
pub use simulation::*;
pub use streams::*;

use crate::capture::CaptureMode;
use crate::code::{Code, Outcome};
use crate::config::Config;
use crate::session::start;
use crate::simulator::Simulator;
use crate::state::Caller;

/// The process's simulated driver, made by the first call of `cuInit`.
static SIMULATOR: OnceLock<Result<Arc<Simulator>, Code>> = OnceLock::new();

thread_local! {
    /// The contexts on this thread's stack, the current one last.
    static CURRENT: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) };
    /// Whether this thread is calling a function of the host's for a stream.
    static IS_CALLBACK: Cell<bool> = const { Cell::new(false) };
    /// The driver that this thread calls instead of the process's.
    static ATTACHED: RefCell<Option<Arc<Simulator>>> = const { RefCell::new(None) };
    /// How often this thread has called each function.
    static CALLS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
    /// What this thread's calls may do to captures.
    static CAPTURE_MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
    /// This thread's number.
    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// Declares functions of the driver. Each answers with a code; the body with an [`Outcome`], to
/// which it has the simulator and the caller.
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
        /// As the driver's documentation says: pointers are null, or valid for what is read or
        /// written there.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            $crate::exports::enter(stringify!($name), |$simulator, $caller| $body)
        }
    )*

        /// The function of this name, if it is one of these.
        pub(super) fn symbol(name: &str) -> Option<*const ()> {
            match name {
                $(stringify!($name) => Some($name as *const ()),)*
                _ => None,
            }
        }
    };
}
pub(crate) use exports;

/// Finds a function by the name that the documentation gives it, which is without a version: the
/// newest that `version` of CUDA has.
#[expect(unused_qualifications, reason = "every module has one of this name")]
fn find(name: &str, version: i32) -> Option<*const ()> {
    let newest = format!("{name}_v2");
    let is_of_13 = name == "cuMemcpyBatchAsync" || name == "cuEventElapsedTime";
    let newest = if is_of_13 && version < 13_000 { name } else { &newest };
    [newest, name].into_iter().find_map(|name| {
        contexts::symbol(name)
            .or_else(|| copies::symbol(name))
            .or_else(|| devices::symbol(name))
            .or_else(|| events::symbol(name))
            .or_else(|| memory::symbol(name))
            .or_else(|| modules::symbol(name))
            .or_else(|| pools::symbol(name))
            .or_else(|| simulation::symbol(name))
            .or_else(|| streams::symbol(name))
    })
}

/// Where a function writes an answer. It comes from a caller in C alone, who promises that it is
/// null or valid.
#[repr(transparent)]
#[derive(Debug)]
pub struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// # Errors
    ///
    /// An invalid value if the pointer is null.
    fn set(self, value: T) -> Outcome {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so valid for a value of the type, as the caller promised; not
        // necessarily aligned.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// As [`set`](Self::set), where null says that nobody wants the answer.
    fn set_if_wanted(self, value: T) {
        // Null is no failure here.
        let _ = self.set(value);
    }

    /// What lies there already, for a function that exchanges it.
    ///
    /// # Errors
    ///
    /// An invalid value if the pointer is null.
    fn peek(self) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so a value of the type, as the caller promised; not necessarily aligned.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// The pointer as that of another type, which the caller promised to be there.
    const fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// Where Rust wants an answer. It has to stay there for the call.
    pub fn to(answer: &mut T) -> Self {
        Self(answer)
    }

    /// Where nobody wants one.
    #[must_use]
    pub const fn nowhere() -> Self {
        Self(std::ptr::null_mut())
    }
}

impl Out<u8> {
    /// Writes a text and a zero byte, cut to `length` bytes.
    fn set_text(self, text: &str, length: i32) -> Outcome {
        let length = usize::try_from(length).map_err(|_| Code::INVALID_VALUE)?;
        if self.0.is_null() || length == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let text = text.as_bytes();
        let text = text.get(..length - 1).unwrap_or(text);
        // SAFETY: the buffer has `length` bytes, as the caller promised.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), self.0, text.len()) };
        Out(self.0.wrapping_add(text.len())).set(0)
    }
}

/// Where a function reads its arguments, one or several. It comes from a caller in C alone, who
/// promises that it is null or valid.
#[repr(transparent)]
#[derive(Debug)]
pub struct In<T>(*const T);

impl<T> Clone for In<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for In<T> {}

impl<T> In<T> {
    /// Arguments in Rust. They have to stay there for the call.
    #[must_use]
    pub const fn of(arguments: &[T]) -> Self {
        Self(arguments.as_ptr())
    }

    /// The pointer as that of another type.
    #[must_use]
    pub const fn cast<U>(self) -> In<U> {
        In(self.0.cast())
    }

    /// No arguments.
    #[must_use]
    pub const fn none() -> Self {
        Self(std::ptr::null())
    }
}

impl<T: Copy> In<T> {
    /// # Errors
    ///
    /// An invalid value if the pointer is null.
    fn get(self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let at = self.0.wrapping_add(index);
        // SAFETY: not null, so valid for as many values as the caller said; not necessarily
        // aligned.
        Ok(unsafe { at.read_unaligned() })
    }

    fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// So many bytes from the pointer on.
    fn bytes(self, length: usize) -> Outcome<Vec<u8>> {
        let bytes = In(self.0.cast::<u8>());
        (0..length).map(|index| bytes.get(index)).collect()
    }
}

impl In<c_char> {
    fn text(self) -> Outcome<&'static CStr> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so a string that ends, as the caller promised. It is let go of before
        // the call returns.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}

/// Runs the body of a function: the context of the thread is looked up, faults that a test asked
/// for come first.
fn enter(name: &'static str, body: impl FnOnce(&Simulator, Caller) -> Outcome) -> u32 {
    // A thread that is about to end has no count any more.
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

/// How often this thread has called a function of the driver; all of them, if none is named.
fn calls_of(name: Option<&str>) -> u64 {
    let is_asked = |called: &str| match name {
        Some(name) => called == name,
        None => !called.starts_with("terrane"),
    };
    CALLS.with_borrow(|calls| {
        calls.iter().filter(|(called, _)| is_asked(called)).map(|(_, count)| count).sum()
    })
}

fn caller() -> Caller {
    let context = CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0));
    Caller { context, thread: THREAD.with(|thread| *thread) }
}

fn simulator(may_be_made: bool) -> Outcome<Arc<Simulator>> {
    if let Some(attached) = ATTACHED.with_borrow(Option::clone) {
        return Ok(attached);
    }
    let made = if may_be_made {
        SIMULATOR.get_or_init(make)
    } else {
        SIMULATOR.get().ok_or(Code::NOT_INITIALIZED)?
    };
    made.clone()
}

fn make() -> Outcome<Arc<Simulator>> {
    let config = Config::from_env().map_err(|error| {
        #[expect(clippy::print_stderr, reason = "a code alone would not say what is misspelt")]
        {
            eprintln!("{error}");
        }
        Code::INVALID_VALUE
    })?;
    // Its threads end with the process, as the driver's do.
    start(config).map(|(simulator, _threads)| simulator)
}

/// Makes this thread call another driver than the process's; none of its contexts is current then.
/// Answers the driver that it has called so far, and its stack.
pub(crate) fn attach(
    simulator: Option<Arc<Simulator>>,
    stack: Vec<u64>,
) -> (Option<Arc<Simulator>>, Vec<u64>) {
    (ATTACHED.replace(simulator), CURRENT.replace(stack))
}

/// Notes that this thread calls functions of the host's for streams, and no function of the driver.
pub(crate) fn mark_as_callback() {
    IS_CALLBACK.set(true);
}

/// Calls a function of the host's.
///
/// # Safety
///
/// `function` is the address of one that takes one pointer, and `data` is such a pointer.
pub(crate) unsafe fn call(function: usize, data: usize) {
    let function = std::ptr::with_exposed_provenance::<()>(function);
    // SAFETY: the caller's promise.
    let function =
        unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn(*mut ())>(function) };
    // SAFETY: the caller's promise.
    unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
}
