//! A value that a task waits for.

use std::future::poll_fn;
use std::sync::Mutex;
use std::task::{Poll, Waker};

use terrane_core::sync::lock;

/// A value that is sent once, and received once.
pub(crate) struct OneShot<T> {
    /// The value, and the task that waits for it.
    state: Mutex<(Option<T>, Option<Waker>)>,
}

impl<T> OneShot<T> {
    pub(crate) const fn new() -> Self {
        Self { state: Mutex::new((None, None)) }
    }

    pub(crate) fn send(&self, value: T) {
        if let Some(task) = self.put(value) {
            task.wake();
        }
    }

    /// Like [`send`](Self::send), for a caller that holds a lock. It wakes the returned task later.
    #[must_use = "the task waits until it is woken"]
    pub(crate) fn put(&self, value: T) -> Option<Waker> {
        let mut state = lock(&self.state);
        state.0 = Some(value);
        state.1.take()
    }

    /// Takes the value if it was sent and not received. It does not wait.
    pub(crate) fn take(&self) -> Option<T> {
        lock(&self.state).0.take()
    }

    /// Waits for the value.
    pub(crate) async fn receive(&self) -> T {
        poll_fn(|context| {
            let latest = context.waker().clone();
            let mut state = lock(&self.state);
            if let Some(value) = state.0.take() {
                drop(state);
                return Poll::Ready(value);
            }
            let before = state.1.replace(latest);
            drop(state);
            drop(before);
            Poll::Pending
        })
        .await
    }
}
