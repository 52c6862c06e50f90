//! The gate that changes of the store's content enter. A clear closes it while it runs.

use std::future::poll_fn;
use std::sync::{Condvar, Mutex};
use std::task::{Poll, Waker};

use terrane_core::sync::{lock, unpoisoned};

/// A task that finds the gate closed waits asynchronously. A clear blocks its thread until the
/// changes inside have ended, which is short.
#[derive(Default)]
pub(crate) struct Gate {
    state: Mutex<GateState>,
    emptied: Condvar,
}

#[derive(Default)]
struct GateState {
    inside: usize,
    is_closed: bool,
    /// The number of clears.
    epoch: u64,
    waiting: Vec<Waker>,
}

/// A change that is inside. Its task must not await anything meanwhile.
pub(crate) struct GateEntry<'a> {
    gate: &'a Gate,
    pub(crate) epoch: u64,
}

/// A closed gate. It opens on drop.
pub(crate) struct ClosedGate<'a> {
    gate: &'a Gate,
}

impl Gate {
    /// The number of clears so far.
    pub(crate) fn epoch(&self) -> u64 {
        lock(&self.state).epoch
    }

    pub(crate) async fn enter(&self) -> GateEntry<'_> {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut state = lock(&self.state);
            if state.is_closed {
                state.waiting.push(latest);
                return Poll::Pending;
            }
            state.inside += 1;
            let epoch = state.epoch;
            drop(state);
            Poll::Ready(GateEntry { gate: self, epoch })
        })
        .await
    }

    /// Begins a new epoch, and waits until no change is inside. One thread at a time calls it.
    pub(crate) fn close(&self) -> ClosedGate<'_> {
        let mut state = lock(&self.state);
        state.is_closed = true;
        state.epoch += 1;
        while state.inside > 0 {
            state = unpoisoned(self.emptied.wait(state));
        }
        drop(state);
        ClosedGate { gate: self }
    }
}

impl Drop for GateEntry<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.gate.state);
        state.inside -= 1;
        let is_last = state.inside == 0 && state.is_closed;
        drop(state);
        if is_last {
            self.gate.emptied.notify_one();
        }
    }
}

impl Drop for ClosedGate<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.gate.state);
        state.is_closed = false;
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}
