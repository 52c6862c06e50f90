//! The queue on threads, for systems that forbid io_uring.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use terrane_core::OsError;

use super::request::{IoCompletion, IoFailure, IoOperation};
use super::transfer::{IoStep, StepOutcome, StopReason, Transfer, Vectors};
use crate::error::StorageError;
use crate::sys;

/// The maximum number of bytes of one system call here. Between calls a worker checks the deadline.
const STEP: usize = 16 << 20;

struct Job {
    slot: usize,
    transfer: Transfer,
}

enum Message {
    Finished { slot: usize, transfer: Transfer, outcome: Result<(), Box<IoFailure>> },
    Wake,
}

pub(super) struct Workers {
    /// Dropped before the threads are joined, so that the workers exit.
    jobs: Option<Sender<Job>>,
    /// The requests that no worker has taken. If all workers hang, this thread ends those that stop.
    waiting: Receiver<Job>,
    messages: Receiver<Message>,
    waker: WakeSender,
    /// The requests in flight, by slot.
    slots: Vec<Slot>,
    /// Whether requests were stopped that no worker may have taken.
    has_stopped: bool,
    free: Vec<usize>,
    /// Whether the caller has stopped the request in a slot.
    stops: Arc<[AtomicBool]>,
    spare_vectors: Vec<Vectors>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Clone, Debug, Default)]
struct Slot {
    token: Option<u64>,
    /// `None` once it has passed.
    deadline: Option<Instant>,
}

/// Ends a wait from another thread. Wakes that the queue has not seen yet count as one.
#[derive(Clone)]
pub(super) struct WakeSender {
    messages: Sender<Message>,
    is_pending: Arc<AtomicBool>,
}

impl WakeSender {
    pub(super) fn wake(&self) {
        if !self.is_pending.swap(true, Ordering::AcqRel) {
            // If the queue was dropped, the receiver was dropped and no thread waits.
            let _ = self.messages.send(Message::Wake);
        }
    }
}

impl Workers {
    pub(super) fn new(depth: usize, count: usize) -> Result<Self, StorageError> {
        let (jobs, job_receiver) = crossbeam_channel::bounded(depth);
        let (sender, messages) = crossbeam_channel::unbounded();
        let mut workers = Self {
            jobs: Some(jobs),
            waiting: job_receiver,
            messages,
            waker: WakeSender { messages: sender, is_pending: Arc::default() },
            slots: vec![Slot::default(); depth],
            has_stopped: false,
            free: (0..depth).rev().collect(),
            stops: (0..depth).map(|_| AtomicBool::new(false)).collect(),
            spare_vectors: Vec::new(),
            threads: Vec::with_capacity(count),
        };
        for number in 0..count {
            let jobs: Receiver<Job> = workers.waiting.clone();
            let messages = workers.waker.messages.clone();
            let stops = Arc::clone(&workers.stops);
            let thread = std::thread::Builder::new()
                .name(format!("terrane-io-{number}"))
                .spawn(move || work(&jobs, &messages, &stops))
                .map_err(|error| StorageError::Thread {
                    source: OsError::from_io("pthread_create", &error),
                })?;
            workers.threads.push(thread);
        }
        Ok(workers)
    }

    pub(super) fn waker(&self) -> WakeSender {
        self.waker.clone()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn spare_vectors(&mut self) -> Vectors {
        self.spare_vectors.pop().unwrap_or_default()
    }

    pub(super) fn submit(&mut self, transfer: Transfer) -> Result<(), StorageError> {
        let full = StorageError::QueueFull { depth: self.slots.len() };
        let (Some(jobs), Some(slot)) = (&self.jobs, self.free.pop()) else { return Err(full) };
        let request = Slot { token: Some(transfer.token), deadline: transfer.deadline };
        if let Some(stop) = self.stops.get(slot) {
            stop.store(false, Ordering::Relaxed);
        }
        // The channel has room for every slot. Its receivers live as long as the workers.
        if jobs.send(Job { slot, transfer }).is_err() {
            self.free.push(slot);
            return Err(full);
        }
        if let Some(place) = self.slots.get_mut(slot) {
            *place = request;
        }
        Ok(())
    }

    /// Requests the workers to end, at their next step, the requests for which `select` returns
    /// `true`. The next wait ends those that no worker has taken.
    pub(super) fn stop(&mut self, select: impl Fn(u64) -> bool) {
        for (slot, flag) in self.slots.iter().zip(self.stops.iter()) {
            if slot.token.is_some_and(&select) {
                flag.store(true, Ordering::Relaxed);
                self.has_stopped = true;
            }
        }
    }

    /// Like [`IoQueue::wait`](super::IoQueue::wait). The workers check the deadlines of the requests
    /// that they have taken, between their steps. This function checks those of the others.
    pub(super) fn wait(
        &mut self,
        until: Option<Instant>,
        completions: &mut Vec<IoCompletion>,
    ) -> Result<(), StorageError> {
        let before = completions.len();
        let mut woken = false;
        loop {
            let nearest = self.slots.iter().filter_map(|slot| slot.deadline).min();
            if self.has_stopped || nearest.is_some_and(|deadline| deadline <= Instant::now()) {
                self.end_waiting(completions);
                continue;
            }
            while let Ok(message) = self.messages.try_recv() {
                woken |= self.take(message, completions);
            }
            if completions.len() > before || woken || self.in_flight() == 0 {
                return Ok(());
            }
            let message = match until.into_iter().chain(nearest).min() {
                Some(first) => match self.messages.recv_deadline(first) {
                    Ok(message) => message,
                    Err(RecvTimeoutError::Timeout) if until.is_none_or(|until| first < until) => {
                        continue;
                    }
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                        return Ok(());
                    }
                },
                None => match self.messages.recv() {
                    Ok(message) => message,
                    Err(_) => return Ok(()),
                },
            };
            woken |= self.take(message, completions);
        }
    }

    /// Ends the requests that must stop and that no worker has taken.
    fn end_waiting(&mut self, completions: &mut Vec<IoCompletion>) {
        self.has_stopped = false;
        let now = Instant::now();
        for slot in &mut self.slots {
            slot.deadline.take_if(|deadline| *deadline <= now);
        }
        let waiting: Vec<Job> = self.waiting.try_iter().collect();
        for Job { slot, transfer } in waiting {
            if let Some(stop) = stop_of(&transfer, self.stops.get(slot)) {
                let outcome = Err(Box::new(transfer.stopped(stop)));
                self.take(Message::Finished { slot, transfer, outcome }, completions);
            } else if let Some(jobs) = &self.jobs {
                // The channel had room for it.
                let _ = jobs.send(Job { slot, transfer });
            }
        }
    }

    /// Processes a message. Returns whether it was a wake.
    fn take(&mut self, message: Message, completions: &mut Vec<IoCompletion>) -> bool {
        match message {
            Message::Finished { slot, transfer, outcome } => {
                if let Some(place) = self.slots.get_mut(slot) {
                    *place = Slot::default();
                }
                self.free.push(slot);
                let outcome = outcome.map_err(|failure| *failure);
                completions.push(IoCompletion { token: transfer.token, outcome });
                self.spare_vectors.push(transfer.into_vectors());
                false
            }
            Message::Wake => {
                // A plain store is not enough. A thread that finds the flag still set sends no
                // message. The swap makes its earlier writes visible here, before the caller checks
                // for them.
                self.waker.is_pending.swap(false, Ordering::AcqRel);
                true
            }
        }
    }
}

impl Drop for Workers {
    /// Stops the requests in flight and joins the workers. No worker uses a buffer after that.
    fn drop(&mut self) {
        self.stop(|_| true);
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A worker that panicked has exited too.
            let _ = thread.join();
        }
    }
}

/// The main loop of a worker.
fn work(jobs: &Receiver<Job>, messages: &Sender<Message>, stops: &[AtomicBool]) {
    while let Ok(Job { slot, mut transfer }) = jobs.recv() {
        let outcome = loop {
            if let Some(stop) = stop_of(&transfer, stops.get(slot)) {
                break Err(transfer.stopped(stop));
            }
            if let StepOutcome::Finished(outcome) = transfer.advance(make_call(&transfer)) {
                break outcome;
            }
        };
        let outcome = outcome.map_err(Box::new);
        if messages.send(Message::Finished { slot, transfer, outcome }).is_err() {
            return;
        }
    }
}

fn stop_of(transfer: &Transfer, flag: Option<&AtomicBool>) -> Option<StopReason> {
    if flag.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
        return Some(StopReason::Caller);
    }
    transfer
        .deadline
        .is_some_and(|deadline| deadline <= Instant::now())
        .then_some(StopReason::Deadline)
}

/// Makes the system call of the next step.
fn make_call(transfer: &Transfer) -> Result<usize, i32> {
    let descriptor = transfer.file.descriptor;
    let single;
    let (vectors, offset) = match transfer.step(STEP) {
        IoStep::Single(vector, offset) => {
            single = [vector];
            (&single[..], offset)
        }
        IoStep::Vectored(vectors, offset) => (vectors, offset),
        IoStep::Sync => {
            let data_only = transfer.operation == IoOperation::SyncData;
            // SAFETY: the submitter of the request keeps the descriptor open until the request
            // completes, which is after this call.
            let result = unsafe { sys::file::sync(descriptor, data_only) };
            return result.map(|()| 0).map_err(|error| error.code);
        }
    };
    let is_read = transfer.operation == IoOperation::Read;
    // SAFETY: the submitter of the request keeps the buffers writable, or readable for a write, and the
    // descriptor open until the request completes, which is after this call.
    let result = unsafe { sys::file::transfer(descriptor, vectors, offset, is_read) };
    result.map_err(|error| error.code)
}
