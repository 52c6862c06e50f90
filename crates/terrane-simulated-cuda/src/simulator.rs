//! The state behind its lock, and the threads that run steps.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::code::{Code, Outcome};
use crate::config::{Config, Policy};
use crate::state::{Caller, Mark, State};

/// The number of steps that the background thread runs at once after a while without calls.
const BACKGROUND_STEPS: u64 = 16;

/// A simulated driver with its devices.
#[derive(Debug)]
pub struct Simulator {
    state: Mutex<State>,
    /// Signals a change that a thread may wait for.
    changed: Condvar,
    policy: Policy,
}

impl Simulator {
    /// # Errors
    ///
    /// The system's error, if it does not reserve the devices' addresses.
    pub fn new(config: Config) -> Outcome<Self> {
        let policy = config.policy;
        Ok(Self { state: Mutex::new(State::new(config)?), changed: Condvar::new(), policy })
    }

    /// Runs `call` on the state, and wakes threads that wait for a change.
    pub fn with<T>(&self, call: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        state.activity = state.activity.wrapping_add(1);
        let answer = call(&mut state);
        drop(state);
        self.changed.notify_all();
        answer
    }

    /// Blocks until the streams have reached all of these marks, and runs steps meanwhile.
    ///
    /// # Errors
    ///
    /// The code with which the context was lost, if it was.
    pub fn wait(&self, context: u64, marks: &[Mark]) -> Outcome {
        let mut state = self.lock();
        state.activity = state.activity.wrapping_add(1);
        loop {
            let lost = state.contexts.get(&context).map(|context| context.lost);
            match lost {
                None => return Err(Code::CONTEXT_IS_DESTROYED),
                Some(Some(code)) => return Err(code),
                Some(None) => {}
            }
            let missing: Vec<Mark> =
                marks.iter().copied().filter(|&mark| !state.is_done(mark)).collect();
            let Some(&first) = missing.first() else {
                state.release_beyond_thresholds();
                drop(state);
                self.changed.notify_all();
                return Ok(());
            };
            let can_go_on = missing.iter().any(|&mark| state.advance(mark));
            if can_go_on {
                // Other threads get the lock between any two steps.
                drop(state);
                self.changed.notify_all();
                state = self.lock();
            } else if !state.is_done(first) {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Blocks until all work of a context has run.
    ///
    /// # Errors
    ///
    /// As for [`wait`](Self::wait).
    pub fn wait_for_context(&self, caller: Caller) -> Outcome {
        let marks = self.with(|state| {
            state.context(caller.context)?;
            Ok(state.marks_of(caller.context))
        })?;
        self.wait(caller.context, &marks)
    }

    /// Makes the background threads return.
    pub fn end(&self) {
        self.with(|state| state.is_ending = true);
    }

    /// Runs steps after a while without calls, so that a program that only reads memory, or calls
    /// seldom, sees progress. Returns at the [end](Self::end).
    pub fn drive(&self) {
        let pause = match self.policy {
            Policy::Lazy => Duration::from_millis(10),
            Policy::Eager | Policy::Random => Duration::from_micros(500),
        };
        let mut state = self.lock();
        let goes_on = state.config.background;
        while goes_on && !state.is_ending {
            if !state.has_work() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let seen = state.activity;
            drop(state);
            std::thread::sleep(pause);
            state = self.lock();
            if state.activity == seen {
                for _ in 0..=state.random.below(BACKGROUND_STEPS) {
                    state.step_any();
                }
                self.changed.notify_all();
            }
        }
    }

    /// Calls the host functions that streams have reached. Returns at the [end](Self::end).
    ///
    /// # Safety
    ///
    /// Everything that was submitted as a host function is one, for the data that was submitted
    /// with it.
    pub unsafe fn call_back(&self) {
        let mut state = self.lock();
        while !state.is_ending {
            let Some(callback) = state.callbacks.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(state);
            // SAFETY: the caller guarantees it.
            unsafe { call(callback.function, callback.data) };
            state = self.lock();
            state.returned(callback.stream);
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls a host function.
///
/// # Safety
///
/// `function` is the address of a function with one pointer parameter, and `data` is such a
/// pointer.
unsafe fn call(function: usize, data: usize) {
    let function = std::ptr::with_exposed_provenance::<()>(function);
    // SAFETY: the caller guarantees it.
    let function =
        unsafe { std::mem::transmute::<*const (), unsafe extern "C" fn(*mut ())>(function) };
    // SAFETY: the caller guarantees it.
    unsafe { function(std::ptr::with_exposed_provenance_mut(data)) };
}
