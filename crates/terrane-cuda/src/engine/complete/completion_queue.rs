//! The threads that wait for the device, and their tasks.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use terrane_core::sync::{lock, unpoisoned};
use terrane_transfer::{CopyFailure, CopyJob};

use crate::engine::complete::failed_job::FailedJob;
use crate::engine::complete::in_flight::{DueTime, InFlight};
use crate::engine::complete::orphans::Orphans;
use crate::engine::resources::block_lists::ListPool;
use crate::engine::submit::queued_job::WaitingJob;
use crate::engine::submit::submission::Submission;

/// A task of a completion thread.
pub(crate) enum Task {
    /// Waits for a job's end.
    InFlight(Arc<InFlight>),
    /// Finishes a job without submitted work, outside the caller's thread.
    Finish(CopyJob, Result<(), CopyFailure>),
    /// Waits for the submitted work of a failed job, and finishes the job.
    Failed(FailedJob),
    /// Finishes a job that had nothing to submit.
    NotSubmitted(Box<Submission>),
    /// Waits until a job may begin, and enqueues it.
    Waiting(Box<WaitingJob>),
}

impl Task {
    /// The end of a job whose chunks are all submitted. Threads that wait for the job poll it from
    /// here on.
    pub(crate) fn of_submitted(submission: Box<Submission>, due: Option<DueTime>) -> Self {
        match submission.into_in_flight(due) {
            Ok(in_flight) => {
                in_flight.invite();
                Self::InFlight(in_flight)
            }
            Err(submission) => Self::NotSubmitted(submission),
        }
    }

    /// Runs the task until it is done, however long that takes.
    fn run_to_end(self, orphans: &Orphans) {
        match self {
            Self::InFlight(in_flight) => {
                if let Some(failed) = in_flight.run_to_end() {
                    failed.run_to_end(orphans);
                }
            }
            Self::Finish(job, result) => job.finish(result),
            Self::Failed(failed) => failed.run_to_end(orphans),
            Self::NotSubmitted(submission) => submission.finish(Ok(())),
            Self::Waiting(waiting) => match waiting.order_event.wait() {
                Ok(()) => waiting.enqueue(),
                Err(error) => waiting.cancel(error),
            },
        }
    }

    /// Whether the task waits for a transfer that should end soon, and that callers' threads also
    /// poll.
    fn is_short(&self) -> bool {
        matches!(self, Self::InFlight(in_flight) if in_flight.is_short())
    }

    /// Whether a poll now would change nothing. Runs no foreign code.
    fn is_pending(&self) -> bool {
        matches!(self, Self::InFlight(in_flight) if in_flight.is_pending())
    }

    /// Completes the task if nothing is left to wait for, and returns it otherwise.
    fn check(self, orphans: &Orphans) -> Option<Self> {
        match self {
            Self::InFlight(in_flight) => match in_flight.try_check() {
                Ok(true) => None,
                Ok(false) => Some(Self::InFlight(in_flight)),
                Err(error) => in_flight.give_up(error).map(Self::Failed),
            },
            Self::Failed(failed) => failed.check(orphans).map(Self::Failed),
            Self::Waiting(waiting) => match waiting.order_event.is_satisfied() {
                Ok(false) => Some(Self::Waiting(waiting)),
                Ok(true) => {
                    waiting.enqueue();
                    None
                }
                Err(error) => {
                    waiting.cancel(error);
                    None
                }
            },
            Self::Finish(..) | Self::NotSubmitted(_) => {
                self.run_to_end(orphans);
                None
            }
        }
    }
}

/// The tasks of the completion threads. Each thread sleeps until its task is done. One thread, the
/// attendant, polls several tasks in turn: the [short](Task::is_short) ones. If no other thread is
/// free, it polls all new tasks, so that no task waits behind tasks that it delays.
///
/// Waking a thread costs the submitting thread a microsecond or more. So the attendant polls for
/// new tasks for a while after the last short task.
///
/// Ending a job runs foreign code: a guard's drop or a waker, which may wait for another job. So
/// every thread, including the attendant, holds one task at a time. The other tasks are in the
/// queue, where any free thread finds them.
pub(crate) struct CompletionQueue {
    queue: Mutex<Queue>,
    /// Signals a task for a free thread, or the end of tasks.
    changed: Condvar,
    orphans: Arc<Orphans>,
    lists: Arc<ListPool>,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// The number of threads without a task.
    idle: usize,
    /// Whether there is an attendant. The flag is false while that thread may run foreign code or
    /// free memory, which may block forever. Another free thread then becomes the attendant.
    is_attended: bool,
    /// The number of task sources.
    senders: usize,
}

/// A source of tasks for a [`CompletionQueue`]. When the last source drops, the threads end after the
/// remaining tasks.
pub(crate) struct CompletionThreads(Arc<CompletionQueue>);

impl CompletionThreads {
    pub(crate) fn new(queue: &Arc<CompletionQueue>) -> Self {
        queue.queue().senders += 1;
        Self(Arc::clone(queue))
    }

    /// Adds a task. The threads run at least as long as this value lives.
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

impl Clone for CompletionThreads {
    fn clone(&self) -> Self {
        Self::new(&self.0)
    }
}

impl Drop for CompletionThreads {
    fn drop(&mut self) {
        self.0.queue().senders -= 1;
        self.0.changed.notify_all();
    }
}

/// The attendant's sleeps between two polls of all its tasks.
const SHORTEST_SLEEP: Duration = Duration::from_micros(20);
const LONGEST_SLEEP: Duration = Duration::from_micros(100);
/// The time for which the attendant polls for short tasks after the last one was enqueued or ended.
/// A series of small transfers stays within one such period. A single transfer is followed by
/// twenty wake-ups.
const IDLE_POLL_TIME: Duration = Duration::from_millis(2);

impl CompletionQueue {
    pub(crate) fn new(orphans: &Arc<Orphans>, lists: &Arc<ListPool>) -> Arc<Self> {
        let (orphans, lists) = (Arc::clone(orphans), Arc::clone(lists));
        Arc::new(Self { queue: Mutex::default(), changed: Condvar::new(), orphans, lists })
    }

    /// The loop of a thread, until no source of tasks is left.
    pub(crate) fn serve(&self) {
        while let Some((task, attends)) = self.next() {
            if attends {
                self.poll_in_turn(task);
            } else {
                guarded(|| task.run_to_end(&self.orphans));
            }
            self.clean_up();
        }
    }

    /// Returns a task, and whether the thread must also poll all new ones; `None` if no source of
    /// tasks is left.
    fn next(&self) -> Option<(Task, bool)> {
        let mut queue = self.queue();
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                let attends = !queue.is_attended && (queue.idle == 0 || task.is_short());
                queue.is_attended |= attends;
                // A thread that sleeps for a long task polls none of the others.
                self.wake_for_the_rest(queue);
                return Some((task, attends));
            }
            if queue.senders == 0 {
                return None;
            }
            queue.idle += 1;
            queue = unpoisoned(self.changed.wait(queue));
            queue.idle -= 1;
        }
    }

    /// Polls this task and all others in turn, as the attendant. Ends when no short task has come
    /// for a while, and another thread is free for the next one.
    fn poll_in_turn(&self, task: Task) {
        let mut task = Some(task);
        // The number of consecutive polls that changed nothing, and their start.
        let (mut unchanged, mut since) = (0, Instant::now());
        loop {
            let lingers = since.elapsed() < IDLE_POLL_TIME;
            let checked = task.take().map(|task| self.check_task(task));
            let mut queue = self.queue();
            match checked {
                Some(TaskState::Replaced) => return,
                Some(TaskState::Done) => {
                    (unchanged, since) = (0, Instant::now());
                }
                Some(TaskState::Waits(only))
                    if queue.tasks.is_empty()
                        && queue.idle > 0
                        && !(lingers && only.is_short()) =>
                {
                    queue.is_attended = false;
                    drop(queue);
                    guarded(|| only.run_to_end(&self.orphans));
                    return;
                }
                Some(TaskState::Waits(waits)) => {
                    queue.tasks.push_back(waits);
                    unchanged += 1;
                    if !lingers && queue.idle > 0 {
                        // This thread takes one of the tasks, and sleeps until it is done.
                        self.changed.notify_one();
                    }
                }
                None => {}
            }
            if queue.tasks.is_empty() && (!lingers || queue.senders == 0) {
                queue.is_attended = false;
                return;
            }
            if unchanged >= queue.tasks.len() {
                let was_empty = queue.tasks.is_empty();
                drop(queue);
                let waited = since.elapsed();
                std::thread::sleep((waited / 4).clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
                queue = self.queue();
                unchanged = 0;
                if was_empty && !queue.tasks.is_empty() {
                    since = Instant::now();
                }
            }
            task = queue.tasks.pop_front();
        }
    }

    /// Polls a task, and cleans up after its end. The attendant gives up its role while foreign code
    /// or a slow call of the driver may run.
    fn check_task(&self, task: Task) -> TaskState {
        if task.is_pending() {
            return TaskState::Waits(task);
        }
        let mut queue = self.queue();
        queue.is_attended = false;
        // Foreign code may wait for one of the other tasks, which no thread was woken for.
        self.wake_for_the_rest(queue);
        let remaining_task = guarded(|| task.check(&self.orphans)).flatten();
        if remaining_task.is_none() {
            self.clean_up();
        }
        let mut queue = self.queue();
        if queue.is_attended {
            queue.tasks.extend(remaining_task);
            return TaskState::Replaced;
        }
        queue.is_attended = true;
        remaining_task.map_or(TaskState::Done, TaskState::Waits)
    }

    /// Wakes a free thread if tasks are left that no thread polls.
    fn wake_for_the_rest(&self, queue: MutexGuard<'_, Queue>) {
        let is_awaited = !queue.is_attended && queue.idle > 0 && !queue.tasks.is_empty();
        drop(queue);
        if is_awaited {
            self.changed.notify_one();
        }
    }

    /// Does the work that must run neither on a caller's thread nor on the attendant.
    fn clean_up(&self) {
        guarded(|| self.orphans.check_again());
        guarded(|| self.lists.free_surplus());
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }
}

/// The result of a poll by the attendant.
enum TaskState {
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
