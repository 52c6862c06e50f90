//! The threads that wait for the device, and their tasks.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use terrane_transfer::{CopyFailure, CopyJob};

use crate::engine::complete::failed_job::Failed;
use crate::engine::complete::in_flight::Flight;
use crate::engine::complete::job_resources::Cargo;
use crate::engine::complete::orphans::Lost;
use crate::engine::resources::block_lists::ListPool;
use crate::engine::submit::queued_job::Gated;

/// A task of a watcher.
pub(crate) enum Task {
    /// Waits for a job's end.
    End(Arc<Flight>),
    /// Finishes a job without submitted work, outside the caller's thread.
    Over(Box<CopyJob>, Result<(), CopyFailure>),
    /// Waits for the submitted work of a failed job, and finishes the job.
    Drain(Failed),
    /// Finishes a job that had nothing to submit.
    Drained(Box<Cargo>),
    /// Waits until a job may begin, and hands it to its feeder.
    Gate(Box<Gated>),
}

impl Task {
    /// Completes the task, however long that takes.
    fn see_through(self, lost: &Lost) {
        match self {
            Self::End(flight) => {
                if let Some(failed) = flight.see_through() {
                    failed.see_through(lost);
                }
            }
            Self::Over(job, result) => job.finish(result),
            Self::Drain(failed) => failed.see_through(lost),
            Self::Drained(cargo) => cargo.finish(Ok(())),
            Self::Gate(gated) => match gated.gate.wait() {
                Ok(()) => gated.go_on(),
                Err(error) => gated.cancel(error),
            },
        }
    }

    /// Whether it waits for a transfer that should end soon, and that callers' threads also poll.
    fn is_short(&self) -> bool {
        matches!(self, Self::End(flight) if flight.is_short())
    }

    /// Whether a poll now would change nothing. Runs no foreign code.
    fn is_pending(&self) -> bool {
        matches!(self, Self::End(flight) if flight.is_pending())
    }

    /// Completes the task if nothing is left to wait for, and returns it otherwise.
    fn look(self, lost: &Lost) -> Option<Self> {
        match self {
            Self::End(flight) => match flight.try_look() {
                Ok(true) => None,
                Ok(false) => Some(Self::End(flight)),
                Err(error) => flight.give_up(error).map(Self::Drain),
            },
            Self::Drain(failed) => failed.look(lost).map(Self::Drain),
            Self::Gate(gated) => match gated.gate.is_open() {
                Ok(false) => Some(Self::Gate(gated)),
                Ok(true) => {
                    gated.go_on();
                    None
                }
                Err(error) => {
                    gated.cancel(error);
                    None
                }
            },
            Self::Over(..) | Self::Drained(_) => {
                self.see_through(lost);
                None
            }
        }
    }
}

/// The tasks of some threads, each of which sleeps until one task is done. One of them, the
/// attendant, polls several tasks in turn. It polls the [short](Task::is_short) ones. If no other
/// thread is free, it polls all new ones, so that no task waits for the device behind others that
/// it delays.
///
/// Waking a thread costs the submitting thread a microsecond or more, so the attendant lingers. For
/// a while after the last short task it polls for the next one.
///
/// Ending a job runs foreign code: a guard's drop or a waker, which may wait for another job. So
/// every thread, including the attendant, holds one task at a time. The other tasks lie in the
/// queue, where any free thread finds them.
pub(crate) struct Watch {
    queue: Mutex<Queue>,
    /// Signals a task for a free thread, or the end of tasks.
    changed: Condvar,
    lost: Arc<Lost>,
    lists: Arc<ListPool>,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Threads without a task.
    idle: usize,
    /// Whether there is an attendant. It is false while that thread may run foreign code, which may
    /// not return. Another thread that returns meanwhile takes its place.
    is_attended: bool,
    /// The number of task sources.
    givers: usize,
}

/// A source of tasks for a [`Watch`]. When the last source drops, the threads end after the
/// remaining tasks.
pub(crate) struct Watchers(Arc<Watch>);

impl Watchers {
    pub(crate) fn new(watch: &Arc<Watch>) -> Self {
        watch.queue().givers += 1;
        Self(Arc::clone(watch))
    }

    /// The threads exist while this value exists.
    pub(crate) fn send(&self, task: Task) {
        let is_short = task.is_short();
        let mut queue = self.0.queue();
        queue.tasks.push_back(task);
        let is_awaited = queue.idle > 0 && !(is_short && queue.is_attended);
        drop(queue);
        if is_awaited {
            self.0.changed.notify_one();
        }
    }
}

impl Clone for Watchers {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for Watchers {
    fn drop(&mut self) {
        self.0.queue().givers -= 1;
        self.0.changed.notify_all();
    }
}

/// The attendant's sleeps between two polls of all its tasks.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_micros(100);
/// The time for which the attendant polls for short tasks after the last one has come or ended. A
/// series of small transfers stays within one such period. A single transfer is followed by twenty
/// wake-ups.
const LINGERS: Duration = Duration::from_millis(2);

impl Watch {
    pub(crate) fn new(lost: &Arc<Lost>, lists: &Arc<ListPool>) -> Arc<Self> {
        let (lost, lists) = (Arc::clone(lost), Arc::clone(lists));
        Arc::new(Self { queue: Mutex::default(), changed: Condvar::new(), lost, lists })
    }

    /// The loop of a thread, until no source of tasks is left.
    pub(crate) fn serve(&self) {
        while let Some((task, attends)) = self.next() {
            if attends {
                self.take_turns(task);
            } else {
                guarded(|| task.see_through(&self.lost));
            }
            self.clear_up();
        }
    }

    /// A task, and whether the thread must also serve all new ones; `None` if no more tasks will
    /// come.
    fn next(&self) -> Option<(Task, bool)> {
        let mut queue = self.queue();
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                let attends = !queue.is_attended && (queue.idle == 0 || task.is_short());
                queue.is_attended |= attends;
                return Some((task, attends));
            }
            if queue.givers == 0 {
                return None;
            }
            queue.idle += 1;
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }

    /// Polls this task and all others in turn, as the attendant. Ends when no short task has come
    /// for a while, and another thread is free for the next one.
    fn take_turns(&self, task: Task) {
        let mut task = Some(task);
        // The number of consecutive polls that changed nothing, and their start.
        let (mut in_vain, mut since) = (0, Instant::now());
        loop {
            let lingers = since.elapsed() < LINGERS;
            let looked_at = task.take().map(|task| self.look_at(task));
            let mut queue = self.queue();
            match looked_at {
                Some(Look::Replaced) => return,
                Some(Look::Done) => {
                    (in_vain, since) = (0, Instant::now());
                    drop(queue);
                    self.clear_up();
                    queue = self.queue();
                }
                Some(Look::Waits(only))
                    if queue.tasks.is_empty()
                        && queue.idle > 0
                        && !(lingers && only.is_short()) =>
                {
                    queue.is_attended = false;
                    drop(queue);
                    guarded(|| only.see_through(&self.lost));
                    return;
                }
                Some(Look::Waits(waits)) => {
                    queue.tasks.push_back(waits);
                    in_vain += 1;
                    if !lingers && queue.idle > 0 {
                        // It takes one of them, and sleeps until that one is done.
                        self.changed.notify_one();
                    }
                }
                None => {}
            }
            if queue.tasks.is_empty() && (!lingers || queue.givers == 0) {
                queue.is_attended = false;
                return;
            }
            if in_vain >= queue.tasks.len() {
                let was_empty = queue.tasks.is_empty();
                drop(queue);
                let waited = since.elapsed();
                std::thread::sleep((waited / 4).clamp(SHORTEST_NAP, LONGEST_NAP));
                queue = self.queue();
                in_vain = 0;
                if was_empty && !queue.tasks.is_empty() {
                    since = Instant::now();
                }
            }
            task = queue.tasks.pop_front();
        }
    }

    /// Polls a task. The attendant gives up its role while foreign code may run.
    fn look_at(&self, task: Task) -> Look {
        if task.is_pending() {
            return Look::Waits(task);
        }
        self.queue().is_attended = false;
        let left = guarded(|| task.look(&self.lost)).flatten();
        let mut queue = self.queue();
        if queue.is_attended {
            queue.tasks.extend(left);
            return Look::Replaced;
        }
        queue.is_attended = true;
        left.map_or(Look::Done, Look::Waits)
    }

    /// Does the work that must not run on a caller's thread.
    fn clear_up(&self) {
        guarded(|| self.lost.ask_again());
        self.lists.free_surplus();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of a poll by the attendant.
enum Look {
    /// The task is done.
    Done,
    /// The task is still waiting.
    Waits(Task),
    /// Another thread has become the attendant meanwhile, and holds the task.
    Replaced,
}

/// Only foreign code can panic, such as the drop of a caller's guard. The thread must continue with
/// other jobs.
fn guarded<T>(run: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(run)).ok()
}
