//! The executor: the thread `terrane-store`, which runs the tasks of jobs, and its timers.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use async_task::Runnable;
use crossbeam_channel::{Receiver, Sender, unbounded};
use terrane_core::OwnerProcess;
use terrane_core::sync::lock;

use crate::error::StoreError;

/// Runs tasks on one thread. The first poll of a task is on the thread that spawns it. Clones share
/// the executor.
#[derive(Clone)]
pub(crate) struct Executor {
    shared: Arc<Shared>,
}

struct Shared {
    owner: OwnerProcess,
    queue: Sender<Ready>,
    ready: Receiver<Ready>,
    timers: Mutex<Timers>,
    /// The tasks that have not ended.
    tasks: AtomicUsize,
    is_stopping: AtomicBool,
}

#[derive(Default)]
struct Timers {
    wakers: BTreeMap<TimerKey, Waker>,
    next: u64,
}

/// Work for the thread.
enum Ready {
    Task(Runnable),
    Call(Box<dyn FnOnce() + Send>),
    /// The thread checks its timers, and whether it has to end.
    Check,
}

/// The time of a timer, and its number among those of that time.
type TimerKey = (Instant, u64);

/// A timer. Dropping it removes the timer.
pub(crate) struct Timer {
    executor: Executor,
    key: TimerKey,
}

/// Counts a task until this drops.
pub(crate) struct LiveTask {
    executor: Executor,
}

impl Executor {
    pub(crate) fn new() -> Self {
        let (queue, ready) = unbounded();
        Self {
            shared: Arc::new(Shared {
                owner: OwnerProcess::current(),
                queue,
                ready,
                timers: Mutex::default(),
                tasks: AtomicUsize::new(0),
                is_stopping: AtomicBool::new(false),
            }),
        }
    }

    /// Starts the thread.
    pub(crate) fn start(&self) -> Result<JoinHandle<()>, StoreError> {
        let executor = self.clone();
        let name = "terrane-store";
        let thread = thread::Builder::new().name(name.to_owned());
        let started = thread.spawn(move || executor.run());
        started.map_err(|source| StoreError::Thread { name, source })
    }

    /// Polls a task on this thread, and on the executor's thread whenever it is woken.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        // The task is moved several times below.
        let task = Box::pin(task);
        let live = self.enter();
        let shared = Arc::clone(&self.shared);
        let schedule = move |runnable| shared.push(Ready::Task(runnable));
        let counted = async move {
            let _live = live;
            task.await;
        };
        let (runnable, task) = async_task::spawn(counted, schedule);
        task.detach();
        run(Ready::Task(runnable));
    }

    /// Counts a task, or a job, until the returned value drops. The thread does not end before.
    pub(crate) fn enter(&self) -> LiveTask {
        self.shared.tasks.fetch_add(1, Ordering::SeqCst);
        LiveTask { executor: self.clone() }
    }

    /// Calls a closure on the thread, after the work that is ready there.
    pub(crate) fn call(&self, call: impl FnOnce() + Send + 'static) {
        self.shared.push(Ready::Call(Box::new(call)));
    }

    /// Whether no work is ready for the thread. A hint: another thread may add some.
    pub(crate) fn has_empty_queue(&self) -> bool {
        self.shared.ready.is_empty()
    }

    /// Wakes `waker` at this time, unless the timer drops first.
    pub(crate) fn timer(&self, at: Instant, waker: Waker) -> Timer {
        let mut timers = lock(&self.shared.timers);
        let key = (at, timers.next);
        timers.next += 1;
        timers.wakers.insert(key, waker);
        let is_first = timers.wakers.keys().next() == Some(&key);
        drop(timers);
        if is_first {
            self.shared.push(Ready::Check);
        }
        Timer { executor: self.clone(), key }
    }

    /// Ends the thread when the last task has ended.
    pub(crate) fn stop(&self) {
        self.shared.is_stopping.store(true, Ordering::SeqCst);
        self.shared.push(Ready::Check);
    }

    fn run(&self) {
        let shared = &self.shared;
        loop {
            let (due, next) = lock(&shared.timers).take_due();
            for waker in due {
                // A waker may run foreign code.
                if catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err() {
                    tracing::error!("the waker of a timer panicked");
                }
            }
            if shared.has_ended() && shared.ready.is_empty() {
                return;
            }
            let received = match next {
                None => shared.ready.recv().ok(),
                Some(at) => shared.ready.recv_deadline(at).ok(),
            };
            received.into_iter().for_each(run);
        }
    }
}

/// Continues a task on the executor's thread, after the work that is ready there.
pub(crate) async fn yield_now() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Polls a task once, or makes a call. A panic drops the task, and its job ends as cancelled.
fn run(ready: Ready) {
    let work = || match ready {
        Ready::Task(runnable) => {
            runnable.run();
        }
        Ready::Call(call) => call(),
        Ready::Check => {}
    };
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!("the task of a job panicked");
    }
}

impl Shared {
    /// Whether the thread has nothing more to do.
    fn has_ended(&self) -> bool {
        self.is_stopping.load(Ordering::SeqCst) && self.tasks.load(Ordering::SeqCst) == 0
    }

    fn push(&self, ready: Ready) {
        // It cannot fail: this value has a receiver, too.
        let _ = self.queue.send(ready);
    }
}

impl Timers {
    /// Takes the wakers whose time has come. Returns the time of the next one, too.
    fn take_due(&mut self) -> (Vec<Waker>, Option<Instant>) {
        let mut due = Vec::new();
        while let Some(first) = self.wakers.first_entry() {
            let (at, _) = *first.key();
            if at > Instant::now() {
                return (due, Some(at));
            }
            due.push(first.remove());
        }
        (due, None)
    }
}

impl Drop for LiveTask {
    fn drop(&mut self) {
        let shared = &self.executor.shared;
        shared.tasks.fetch_sub(1, Ordering::SeqCst);
        if shared.has_ended() {
            shared.push(Ready::Check);
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if !self.executor.shared.owner.is_current() {
            return;
        }
        let waker = lock(&self.executor.shared.timers).wakers.remove(&self.key);
        // Foreign code, outside the lock.
        drop(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::task::Wake;
    use std::time::Duration;

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("a waker of a test");
        }
    }

    struct Sends(mpsc::Sender<()>);

    impl Wake for Sends {
        fn wake(self: Arc<Self>) {
            self.0.send(()).unwrap();
        }
    }

    #[test]
    fn a_panic_in_a_waker_or_a_task_does_not_end_the_thread() {
        let executor = Executor::new();
        executor.spawn(async { panic!("a task of a test") });
        let now = Instant::now();
        let (sender, received) = mpsc::channel();
        let _first = executor.timer(now, Waker::from(Arc::new(Panics)));
        let _second = executor.timer(now, Waker::from(Arc::new(Sends(sender))));
        let thread = executor.start().unwrap();
        received.recv_timeout(Duration::from_secs(60)).unwrap();
        executor.stop();
        thread.join().unwrap();
    }
}
