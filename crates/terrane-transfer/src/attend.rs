//! Waiting threads that help the engine to notice the end.

use std::sync::Weak;
use std::time::Duration;

use crate::engines::threads;
use crate::job::tell_rest;
use crate::sync::{Countdown, yield_now};

/// What an engine lets waiting threads do for it: look whether anything has ended.
///
/// To be woken by another thread costs tens of microseconds, which is as long as a small transfer
/// takes. So a thread that waits for a transfer calls [`poll`](Self::poll) for a while before it
/// goes to sleep, and a thread that only looks calls it once.
///
/// It is help and no duty: nobody may be waiting, so the engine has to notice every end by itself
/// as well.
pub trait Attend: Send + Sync {
    /// Looks once whether work of the engine has ended, and if so does what there is to do:
    /// signals [layers](crate::LayerSignals) and [finishes](crate::CopyJob::finish) jobs, those of
    /// others included.
    ///
    /// It is called on threads of callers, often, on several at once, and again from within itself
    /// (what finishing a job runs may wait for another one). So it takes a microsecond or so and
    /// never blocks: where another thread is at it already, it returns. As wherever a job is
    /// finished, the engine holds no lock meanwhile that it takes to accept one.
    fn poll(&self);
}

/// How long a thread that waits helps before it sleeps, if its manager
/// [says](crate::TransferManager::with_attention) nothing else.
///
/// Longer than a transfer of some MiB between a device and the host takes, and than it takes to be
/// woken; short enough to be no loss where a transfer takes milliseconds.
pub const DEFAULT_ATTENTION: Duration = Duration::from_micros(200);

/// Who attends to a transfer. The engine owns it; it may own the job in turn.
pub(crate) type Attendant = Weak<dyn Attend>;

/// Has the attendant look once. The caller holds no lock, as the job may end in here.
pub(crate) fn poll(attendant: &Attendant) {
    // As on an engine's thread, nothing that drops in here may wait for threads: the caller only
    // wants to know whether a transfer has ended.
    threads::finishing(|| {
        if let Some(attendant) = attendant.upgrade() {
            attendant.poll();
        }
    });
}

/// The part of a wait in which the thread helps: for a while from the first attendant on that it
/// sees, and never again after that.
pub(crate) struct Helping(Countdown);

impl Helping {
    /// Begins a wait. The caller holds no lock, as what this thread has still to tell is told.
    pub(crate) fn new(attention: Duration) -> Self {
        tell_rest();
        Self(Countdown::new(attention))
    }

    /// Whether it is still to help, for which it then calls [`help`](Self::help).
    pub(crate) fn goes_on(&mut self) -> bool {
        self.0.goes_on()
    }

    /// Looks once, and lets others run, who may be what is waited for. The caller holds no lock.
    pub(crate) fn help(attendant: &Attendant) {
        poll(attendant);
        tell_rest();
        yield_now();
    }
}
