//! The state of memory that is used before all of it is prepared. It can be waited for, observed
//! and cancelled.

use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_core::sync::{lock, wait_until};

use super::progress::{Progress, ProgressEntry};
use crate::error::StorageError;

/// How much of a memory is usable during its preparation, counted from its first byte.
///
/// The producer defines "usable": the pages are allocated, or a device can access them. The usable
/// prefix only grows. Usable bytes stay usable while the memory lives, even if the bring-up ends
/// early. A clone is another handle to the same state. It does not keep the memory alive.
#[derive(Debug)]
pub struct BringUp<E = StorageError>(Arc<State<E>>);

/// The producer's side of a [`BringUp`]. If it drops before [`complete`](Self::complete), the
/// bring-up ends as cancelled.
#[derive(Debug)]
pub struct BringUpProducer<E = StorageError> {
    state: Arc<State<E>>,
    /// Set once the progress that includes this bring-up is known.
    entry: OnceLock<ProgressEntry>,
}

#[derive(Debug)]
struct State<E> {
    length: ByteCount,
    touched: AtomicU64,
    usable: AtomicU64,
    is_cancelled: AtomicBool,
    ending: Mutex<Ending<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Ending<E> {
    end: Option<End<E>>,
    wakers: Vec<Waker>,
}

#[derive(Debug)]
enum End<E> {
    Complete,
    Cancelled,
    Failed(Arc<E>),
}

impl<E> BringUp<E> {
    /// Creates a bring-up of `length` bytes with no usable bytes, and its producer.
    #[must_use]
    pub fn new(length: ByteCount) -> (Self, BringUpProducer<E>) {
        let state = Arc::new(State {
            length,
            touched: AtomicU64::new(0),
            usable: AtomicU64::new(0),
            is_cancelled: AtomicBool::new(false),
            ending: Mutex::new(Ending { end: None, wakers: Vec::new() }),
            changed: Condvar::new(),
        });
        (Self(Arc::clone(&state)), BringUpProducer { state, entry: OnceLock::new() })
    }

    /// Creates a complete bring-up: all of `length` bytes are usable.
    #[must_use]
    pub fn complete(length: ByteCount) -> Self {
        let (bring_up, producer) = Self::new(length);
        producer.complete();
        bring_up
    }

    /// The total number of bytes.
    #[must_use]
    pub fn length(&self) -> ByteCount {
        self.0.length
    }

    /// The number of bytes with allocated pages, anywhere in the memory.
    #[must_use]
    pub fn touched(&self) -> ByteCount {
        ByteCount::new(self.0.touched.load(Ordering::Relaxed))
    }

    /// The number of usable bytes from the first byte on.
    #[must_use]
    pub fn usable_prefix(&self) -> ByteCount {
        self.0.usable()
    }

    /// Whether all bytes are usable.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        matches!(lock(&self.0.ending).end, Some(End::Complete))
    }

    /// The reason why the bring-up ended early. `None` if it did not.
    #[must_use]
    pub fn ended(&self) -> Option<BringUpEnded<E>> {
        lock(&self.0.ending).end.as_ref().and_then(|end| self.0.early(end))
    }

    /// Blocks until the first `bytes` bytes are usable or `timeout` has passed. Returns whether
    /// they are usable. A number above the length means all bytes.
    ///
    /// # Errors
    ///
    /// [`BringUpEnded`] if the bring-up ended before they were usable.
    pub fn wait_for(&self, bytes: ByteCount, timeout: Duration) -> Result<bool, BringUpEnded<E>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut ending = lock(&self.0.ending);
        loop {
            if let Some(answer) = self.0.answer(&ending, bytes) {
                return answer.map(|()| true);
            }
            let Ok(changed) = wait_until(&self.0.changed, ending, deadline) else {
                return Ok(false);
            };
            ending = changed;
        }
    }

    /// Waits asynchronously until the first `bytes` bytes are usable. It works with any runtime.
    /// Dropping the future does not stop the bring-up.
    pub fn usable(&self, bytes: ByteCount) -> UsablePrefix<E> {
        UsablePrefix { bring_up: self.clone(), bytes }
    }

    /// Requests that the bring-up stops. It stops soon. Usable bytes stay usable.
    pub fn cancel(&self) {
        self.0.is_cancelled.store(true, Ordering::Relaxed);
    }
}

impl<E> Clone for BringUp<E> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<E> BringUpProducer<E> {
    /// Its entry in a progress. The entry is updated before waiting threads are notified.
    pub(super) fn enter(&self, progress: &Progress) -> &ProgressEntry {
        self.entry.get_or_init(|| progress.enter(self.state.length))
    }

    /// Whether a stop was requested.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.state.is_cancelled.load(Ordering::Relaxed)
    }

    /// Reports that this many more bytes have allocated pages.
    pub fn touched(&self, bytes: ByteCount) {
        self.state.touched.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// Reports that the first `prefix` bytes are usable. A smaller prefix than before has no
    /// effect. A prefix of the full length has none either: call [`complete`](Self::complete), so
    /// that waiting threads see all results of the completion.
    pub fn usable(&self, prefix: ByteCount) {
        if prefix >= self.state.length {
            return;
        }
        if let Some(entry) = self.entry.get() {
            entry.ready_up_to(prefix);
        }
        // Store before taking the lock. A thread that holds the lock and reads the old value sleeps
        // only after it unlocks, so it gets the notification.
        self.state.usable.fetch_max(prefix.get(), Ordering::Release);
        self.state.wake(None);
    }

    /// Requests a stop, as [`BringUp::cancel`] does. For a producer with several threads.
    pub fn stop(&self) {
        self.state.is_cancelled.store(true, Ordering::Relaxed);
    }

    /// Reports that all bytes are usable.
    pub fn complete(mut self) {
        if let Some(entry) = self.entry.take() {
            entry.finish();
        }
        self.state.touched.store(self.state.length.get(), Ordering::Relaxed);
        {
            // Waiting threads must see both changes together.
            let mut ending = lock(&self.state.ending);
            self.state.usable.store(self.state.length.get(), Ordering::Release);
            ending.end.get_or_insert(End::Complete);
        }
        self.state.wake(None);
    }

    /// Ends the bring-up with an error. No more bytes become usable.
    pub fn fail(mut self, error: E) {
        drop(self.entry.take());
        self.state.wake(Some(End::Failed(Arc::new(error))));
    }
}

impl<E> Drop for BringUpProducer<E> {
    fn drop(&mut self) {
        drop(self.entry.take());
        self.state.wake(Some(End::Cancelled));
    }
}

impl<E> State<E> {
    fn usable(&self) -> ByteCount {
        ByteCount::new(self.usable.load(Ordering::Acquire))
    }

    /// Wakes all waiting threads and tasks. Only the first end is stored.
    fn wake(&self, end: Option<End<E>>) {
        let mut ending = lock(&self.ending);
        if ending.end.is_none() {
            ending.end = end;
        }
        let wakers = std::mem::take(&mut ending.wakers);
        drop(ending);
        self.changed.notify_all();
        for waker in wakers {
            // A waker is foreign code. Its panic must not prevent other notifications. It must not
            // stop the producer either, which may be unwinding already.
            if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
                tracing::error!("a waker panicked as memory became usable");
            }
        }
    }

    /// The result of a wait for `bytes` bytes. `None` while they may still become usable.
    fn answer(&self, ending: &Ending<E>, bytes: ByteCount) -> Option<Result<(), BringUpEnded<E>>> {
        if self.usable() >= bytes.min(self.length) {
            return Some(Ok(()));
        }
        ending.end.as_ref().and_then(|end| self.early(end)).map(Err)
    }

    fn early(&self, end: &End<E>) -> Option<BringUpEnded<E>> {
        let cause = match end {
            End::Complete => return None,
            End::Cancelled => None,
            End::Failed(error) => Some(Arc::clone(error)),
        };
        Some(BringUpEnded { usable: self.usable(), of: self.length, cause })
    }
}

/// The bring-up ended before all bytes were usable.
#[derive(Debug)]
pub struct BringUpEnded<E = StorageError> {
    /// The bytes that are usable, and stay usable.
    pub usable: ByteCount,
    /// The total number of bytes.
    pub of: ByteCount,
    /// The cause. `None` if it was cancelled.
    pub cause: Option<Arc<E>>,
}

impl<E> fmt::Display for BringUpEnded<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.cause.is_some() { "failed" } else { "was cancelled" };
        let Self { usable, of, .. } = self;
        write!(
            f,
            "the preparation of {of} {how} after {usable}; use those, or drop the memory and try again"
        )
    }
}

impl<E: std::error::Error + 'static> std::error::Error for BringUpEnded<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_deref().map(|cause| cause as _)
    }
}

/// A future that completes when a prefix is usable. [`BringUp::usable`] returns it.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is awaited"]
pub struct UsablePrefix<E = StorageError> {
    bring_up: BringUp<E>,
    bytes: ByteCount,
}

impl<E> Future for UsablePrefix<E> {
    type Output = Result<(), BringUpEnded<E>>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let state = &self.bring_up.0;
        // Cloning and dropping a waker runs foreign code, so neither happens under the lock.
        let waker = context.waker().clone();
        let mut ending = lock(&state.ending);
        if let Some(answer) = state.answer(&ending, self.bytes) {
            return Poll::Ready(answer);
        }
        if !ending.wakers.iter().any(|known| known.will_wake(&waker)) {
            ending.wakers.push(waker);
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests;
