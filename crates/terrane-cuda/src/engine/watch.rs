//! The threads that wait for the device, and what they wait for.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use terrane_transfer::{CopyFailure, CopyJob};

use super::feeder::Gated;
use super::abandoned::Lost;
use super::lists::ListPool;
use super::flight::{Cargo, Failed, Flight};

/// What a watcher does.
pub(super) enum Task {
    /// Waits for a job's end.
    End(Arc<Flight>),
    /// Finishes a job of which nothing has been submitted: not on the caller's thread.
    Over(Box<CopyJob>, Result<(), CopyFailure>),
    /// Waits for what has been submitted of a job that failed, and finishes it.
    Drain(Failed),
    /// Finishes a job that had nothing to submit.
    Drained(Box<Cargo>),
    /// Waits until a job may begin, and hands it on.
    Gate(Box<Gated>),
}

impl Task {
    /// Does it, however long that takes.
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

    /// Does it if there is nothing to wait for, and gives it back otherwise.
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

/// The tasks of some threads, each of which sleeps until one is done. The last one of them that
/// has nothing to do looks after all that come, in turn, so that none waits for the device behind
/// others that it holds up.
pub(super) struct Watch {
    tasks: Receiver<Task>,
    idle: AtomicUsize,
    lost: Arc<Lost>,
    lists: Arc<ListPool>,
}

/// For so long the last thread looks again at once.
const LOOKS: Duration = Duration::from_micros(20);
/// The longest that it sleeps between two looks.
const LONGEST_NAP: Duration = Duration::from_micros(100);

impl Watch {
    pub(super) fn new(
        tasks: Receiver<Task>,
        lost: &Arc<Lost>,
        lists: &Arc<ListPool>,
    ) -> Arc<Self> {
        let (lost, lists) = (Arc::clone(lost), Arc::clone(lists));
        Arc::new(Self { tasks, idle: AtomicUsize::new(0), lost, lists })
    }

    /// What a thread does until nobody can give it a task any more.
    pub(super) fn serve(&self) {
        loop {
            self.idle.fetch_add(1, Ordering::SeqCst);
            let task = self.tasks.recv();
            let is_last = self.idle.fetch_sub(1, Ordering::SeqCst) == 1;
            let Ok(task) = task else { return };
            if is_last {
                self.take_turns(task);
            } else {
                guarded(|| task.see_through(&self.lost));
            }
            self.clear_up();
        }
    }

    /// Does what no caller's thread should.
    fn clear_up(&self) {
        guarded(|| self.lost.ask_again());
        self.lists.free_surplus();
    }

    /// Looks after this task and all that come meanwhile, until they are done, or there is but one
    /// and another thread to take the next.
    fn take_turns(&self, task: Task) {
        let (mut held, mut next) = (vec![task], Vec::new());
        let mut changed = Instant::now();
        while !held.is_empty() {
            if held.len() == 1 && self.idle.load(Ordering::SeqCst) > 0 {
                if let Some(task) = held.pop() {
                    guarded(|| task.see_through(&self.lost));
                }
                return;
            }
            let before = held.len();
            next.extend(held.drain(..).filter_map(|task| guarded(|| task.look(&self.lost)).flatten()));
            let left = next.len();
            next.extend(self.tasks.try_iter());
            let is_changed = left < before || next.len() > left;
            std::mem::swap(&mut held, &mut next);
            if is_changed {
                self.clear_up();
                changed = Instant::now();
                continue;
            }
            let waited = changed.elapsed();
            if waited < LOOKS {
                std::hint::spin_loop();
            } else {
                std::thread::sleep((waited / 4).min(LONGEST_NAP));
            }
        }
    }
}

/// Only foreign code can panic, such as the drop of a caller's guard. The thread has other jobs to
/// see through.
fn guarded<T>(run: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(run)).ok()
}
