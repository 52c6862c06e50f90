//! The queue on io_uring.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use terrane_core::convert::to_u64;
use terrane_core::{OsError, Reason};

use super::entry::entry_of;
use super::options::IoQueueOptions;
use super::registered::{IoMemory, IoRegistration, Registrar};
use super::request::{IoBuffer, IoCompletion, IoFailure, IoFailureReason};
use super::transfer::{StepOutcome, StopReason, Transfer, Vectors};
use crate::error::StorageError;
use crate::sys;

/// The user data of the poll request for the waker's event.
const WAKE: u64 = u64::MAX;
/// The user data of cancellations. Their completions are ignored: the request's own completion has
/// the result.
const CANCEL: u64 = u64::MAX - 1;

/// The state of a request while the kernel works on it.
#[derive(Debug, Default)]
struct Slot {
    transfer: Option<Transfer>,
    /// Part of the user data, so that a late cancellation never cancels the slot's next request.
    generation: u32,
    /// The number of entries that were queued before the request's last entry.
    queued_after: u64,
}

pub(super) struct Ring {
    ring: IoUring,
    slots: Vec<Slot>,
    free: Vec<u32>,
    spare_vectors: Vec<Vectors>,
    /// The number of requests in flight with a deadline.
    timed: usize,
    wake_event: Arc<File>,
    wake_is_armed: bool,
    /// The number of entries queued so far.
    queued: u64,
    /// The reason why the process may no longer enter the kernel. Once it is set, no entry is
    /// queued and no call is made. The kernel then never accepts the remaining entries.
    refusal: Option<OsError>,
    registrar: Registrar,
}

/// The polling interval for completions when the process cannot wait in the kernel.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl Ring {
    /// Creates a ring with these options, or returns the reason why the kernel refuses it.
    pub(super) fn new(options: &IoQueueOptions) -> Result<Self, Reason> {
        let depth = options.depth;
        // Every request can have one cancellation, and one entry is for the waker. The depth is at
        // most `IoQueueOptions::MAX_DEPTH`.
        let entries = (2 * depth + 1).next_power_of_two();
        let ring = IoUring::builder()
            .dontfork()
            .build(entries)
            .map_err(|error| refusal(OsError::from_io("io_uring_setup", &error)))?;
        if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
            return Err(Reason::Unsupported { by: "the kernel (before Linux 5.11)" });
        }
        // A sandbox can allow the setup and forbid `io_uring_enter`.
        ring.submit().map_err(|error| Reason::Os(OsError::from_io("io_uring_enter", &error)))?;
        let wake_event = sys::event::new().map_err(Reason::Os)?;
        let registrar = Registrar::new(&ring, options.registered);
        Ok(Self {
            ring,
            slots: (0..depth).map(|_| Slot::default()).collect(),
            free: (0..depth).rev().collect(),
            spare_vectors: Vec::new(),
            timed: 0,
            wake_event: Arc::new(wake_event),
            wake_is_armed: false,
            queued: 0,
            refusal: None,
            registrar,
        })
    }

    pub(super) fn wake_event(&self) -> Arc<File> {
        Arc::clone(&self.wake_event)
    }

    pub(super) fn registration(&self) -> IoRegistration {
        self.registrar.registration()
    }

    pub(super) fn note_use(&mut self, memory: &IoMemory, buffers: &[IoBuffer]) {
        let ranges = buffers.iter().map(|b| (b.address.as_ptr().addr(), b.length.to_usize()));
        self.registrar.find(memory, ranges);
    }

    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn spare_vectors(&mut self) -> Vectors {
        self.spare_vectors.pop().unwrap_or_default()
    }

    /// Submits a non-empty transfer, whose buffers are in `memory`. The caller has checked that a
    /// slot is free.
    pub(super) fn submit(
        &mut self,
        mut transfer: Transfer,
        memory: Option<&IoMemory>,
    ) -> Result<(), StorageError> {
        let full = StorageError::QueueFull { depth: self.slots.len() };
        let Some(index) = self.free.pop() else { return Err(full) };
        let Some(slot) = self.slots.get_mut(as_index(index)) else { return Err(full) };
        let is_timed = transfer.deadline.is_some();
        transfer.registered =
            memory.and_then(|memory| self.registrar.find(memory, transfer.ranges()));
        slot.generation = slot.generation.wrapping_add(1);
        slot.transfer = Some(transfer);
        match self.push_step(index) {
            Ok(()) => {
                self.timed += usize::from(is_timed);
                Ok(())
            }
            Err(error) => {
                self.release(index);
                Err(StorageError::Queue { source: error })
            }
        }
    }

    /// Submits all queued entries to the kernel in one call.
    pub(super) fn flush(&mut self) -> Result<(), StorageError> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        self.enter(0, None).map_err(|source| StorageError::Queue { source })
    }

    /// Requests the cancellation of the requests for which `select` returns `true`.
    pub(super) fn stop(
        &mut self,
        stop: StopReason,
        mut select: impl FnMut(&Transfer) -> bool,
    ) -> Result<(), StorageError> {
        for index in 0..self.slots.len() {
            let Some(slot) = self.slots.get(index) else { continue };
            let Some(transfer) = &slot.transfer else { continue };
            let Ok(number) = u32::try_from(index) else { continue };
            if transfer.stop.is_some() || !select(transfer) {
                continue;
            }
            let target = user_data(number, slot.generation);
            let entry = opcode::AsyncCancel::new(target).build().user_data(CANCEL);
            self.push(&entry).map_err(|source| StorageError::Queue { source })?;
            // Mark the request only after the cancellation was queued.
            if let Some(transfer) = self.slots.get_mut(index).and_then(|s| s.transfer.as_mut()) {
                transfer.stop = Some(stop);
            }
        }
        self.flush()
    }

    /// Like [`IoQueue::wait`](super::IoQueue::wait).
    pub(super) fn wait(
        &mut self,
        until: Option<Instant>,
        completions: &mut Vec<IoCompletion>,
    ) -> Result<(), StorageError> {
        if self.refusal.is_some() {
            self.wait_for_taken(until, completions);
            return Ok(());
        }
        let result = self.wait_in_kernel(until, completions);
        if result.is_err() {
            self.end_untaken(completions);
        }
        result
    }

    fn wait_in_kernel(
        &mut self,
        until: Option<Instant>,
        completions: &mut Vec<IoCompletion>,
    ) -> Result<(), StorageError> {
        let before = completions.len();
        loop {
            let woken = self.reap(completions);
            if completions.len() > before || woken || self.in_flight() == 0 {
                // Submit continued requests now, not at the caller's next call.
                return self.flush();
            }
            let deadline = self.next_deadline();
            let next = deadline.into_iter().chain(until).min();
            let now = next.map(|_| Instant::now());
            if deadline.zip(now).is_some_and(|(deadline, now)| deadline <= now) {
                self.stop(StopReason::Deadline, |t| t.deadline.is_some_and(|d| Some(d) <= now))?;
                continue;
            }
            if until.zip(now).is_some_and(|(until, now)| until <= now) {
                self.flush()?;
                self.reap(completions);
                return Ok(());
            }
            let timeout = next.zip(now).map(|(next, now)| next.saturating_duration_since(now));
            self.arm_wake()?;
            self.enter(1, timeout).map_err(|source| StorageError::Queue { source })?;
        }
    }

    /// Waits after a refusal. Entries that the kernel has taken still complete in the shared queue.
    fn wait_for_taken(&mut self, until: Option<Instant>, completions: &mut Vec<IoCompletion>) {
        let before = completions.len();
        self.end_untaken(completions);
        loop {
            if self.reap(completions) | sys::event::drain(&self.wake_event) {
                return;
            }
            let remaining = until.map(|until| until.saturating_duration_since(Instant::now()));
            if completions.len() > before
                || self.in_flight() == 0
                || remaining == Some(Duration::ZERO)
            {
                return;
            }
            std::thread::sleep(remaining.map_or(LOOK_AGAIN, |remaining| remaining.min(LOOK_AGAIN)));
        }
    }

    /// After a refusal, ends the requests whose entries the kernel has not taken and never will.
    fn end_untaken(&mut self, completions: &mut Vec<IoCompletion>) {
        let Some(refusal) = self.refusal else { return };
        let untaken = to_u64(self.ring.submission().len());
        let taken = self.queued.saturating_sub(untaken);
        for index in 0..self.slots.len() {
            let Some(slot) = self.slots.get(index) else { continue };
            let Some(transfer) = &slot.transfer else { continue };
            let Ok(number) = u32::try_from(index) else { continue };
            if slot.queued_after >= taken {
                let outcome = Err(transfer.failure(IoFailureReason::Os(refusal)));
                completions.extend(self.end(number, outcome));
            }
        }
    }

    /// The earliest deadline of a request without a stop.
    fn next_deadline(&self) -> Option<Instant> {
        if self.timed == 0 {
            return None;
        }
        let running = self.slots.iter().filter_map(|slot| slot.transfer.as_ref());
        running.filter(|t| t.stop.is_none()).filter_map(|t| t.deadline).min()
    }

    /// Processes the kernel's completions. Returns whether the waker was used.
    fn reap(&mut self, completions: &mut Vec<IoCompletion>) -> bool {
        let mut woken = false;
        while let Some(entry) = self.next_entry() {
            match entry.user_data() {
                WAKE => {
                    self.wake_is_armed = false;
                    woken = true;
                    sys::event::drain(&self.wake_event);
                }
                CANCEL => {}
                data => completions.extend(self.take_answer(data, entry.result())),
            }
        }
        woken
    }

    fn next_entry(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// Advances the request for `data`. Returns its completion if it has ended.
    fn take_answer(&mut self, data: u64, result: i32) -> Option<IoCompletion> {
        let index = slot_of(data);
        let transfer = self.slots.get_mut(as_index(index))?.transfer.as_mut()?;
        let answer = usize::try_from(result).map_err(|_| result.wrapping_neg());
        let outcome = match transfer.advance(answer) {
            StepOutcome::Finished(outcome) => outcome,
            StepOutcome::Again => match self.push_step(index) {
                Ok(()) => return None,
                Err(error) => {
                    let transfer = self.slots.get(as_index(index))?.transfer.as_ref()?;
                    Err(transfer.failure(IoFailureReason::Os(error)))
                }
            },
        };
        self.end(index, outcome)
    }

    /// Empties the slot of a request that has ended. Returns its completion.
    fn end(&mut self, index: u32, outcome: Result<(), IoFailure>) -> Option<IoCompletion> {
        let transfer = self.release(index)?;
        self.timed -= usize::from(transfer.deadline.is_some());
        let completion = IoCompletion { token: transfer.token, outcome };
        self.spare_vectors.push(transfer.into_vectors());
        Some(completion)
    }

    /// Empties a slot whose request is not, or no longer, in the kernel.
    fn release(&mut self, index: u32) -> Option<Transfer> {
        let transfer = self.slots.get_mut(as_index(index))?.transfer.take();
        self.free.push(index);
        transfer
    }

    /// Queues the next step of the request in slot `index`.
    fn push_step(&mut self, index: u32) -> Result<(), OsError> {
        let Some(slot) = self.slots.get(as_index(index)) else { return Ok(()) };
        let Some(transfer) = &slot.transfer else { return Ok(()) };
        let entry = entry_of(transfer).user_data(user_data(index, slot.generation));
        self.push(&entry)?;
        if let Some(slot) = self.slots.get_mut(as_index(index)) {
            slot.queued_after = self.queued - 1;
        }
        Ok(())
    }

    /// Adds an entry to the submission queue. If the queue is full, it is submitted first.
    fn push(&mut self, entry: &squeue::Entry) -> Result<(), OsError> {
        loop {
            if let Some(refusal) = self.refusal {
                return Err(refusal);
            }
            // SAFETY: the entry's buffers and descriptor stay valid until its completion is reaped.
            // For requests, `IoQueue::submit` requires that. The ring owns the list of vectors and
            // the event, and dropping the ring waits for all entries. After a refusal the kernel
            // takes no entry, so it never uses the buffers of the remaining ones.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                self.queued += 1;
                return Ok(());
            }
            self.enter(0, None)?;
        }
    }

    /// Makes the waker's event end the next wait.
    fn arm_wake(&mut self) -> Result<(), StorageError> {
        if self.wake_is_armed {
            return Ok(());
        }
        let descriptor = types::Fd(self.wake_event.as_raw_fd());
        let readable = u32::from(libc::POLLIN.unsigned_abs());
        let entry = opcode::PollAdd::new(descriptor, readable).build().user_data(WAKE);
        self.push(&entry).map_err(|source| StorageError::Queue { source })?;
        self.wake_is_armed = true;
        Ok(())
    }

    /// Submits the queued entries, and waits for `wanted` completions or for `timeout`.
    ///
    /// # Errors
    ///
    /// The error of the kernel. The kernel is not entered again after it.
    fn enter(&mut self, wanted: usize, timeout: Option<Duration>) -> Result<(), OsError> {
        if let Some(refusal) = self.refusal {
            return Err(refusal);
        }
        let submitter = self.ring.submitter();
        let result = match timeout {
            Some(timeout) => {
                let timeout = types::Timespec::from(timeout);
                let arguments = types::SubmitArgs::new().timespec(&timeout);
                submitter.submit_with_args(wanted, &arguments)
            }
            None => submitter.submit_and_wait(wanted),
        };
        let Err(error) = result else { return Ok(()) };
        let error = OsError::from_io("io_uring_enter", &error);
        match error.code {
            // The caller checks the clock and the completion queue, and calls again.
            libc::ETIME | libc::EINTR => Ok(()),
            // The kernel is short of memory, or the completion queue is full until it is reaped.
            libc::EAGAIN | libc::EBUSY => {
                std::thread::yield_now();
                Ok(())
            }
            _ => {
                self.refusal = Some(error);
                Err(error)
            }
        }
    }
}

impl Drop for Ring {
    /// Cancels the requests in flight. Returns when the kernel no longer uses any buffer.
    fn drop(&mut self) {
        let mut completions = Vec::new();
        while self.in_flight() > 0 {
            // A refusal is recorded. The wait below then ends the requests that the kernel never
            // took.
            let _ = self.stop(StopReason::Caller, |_| true);
            if self.refusal.is_some() || self.wait_in_kernel(None, &mut completions).is_err() {
                self.wait_for_taken(None, &mut completions);
            }
        }
        self.registrar.close();
    }
}

/// Converts a failed `io_uring_setup` to a reason.
fn refusal(error: OsError) -> Reason {
    const SWITCH: &str = "/proc/sys/kernel/io_uring_disabled";
    let is_disabled =
        || std::fs::read_to_string(SWITCH).is_ok_and(|text| text.trim().parse() != Ok(0_u32));
    match error.code {
        libc::ENOSYS => Reason::Unsupported { by: "the kernel, or its seccomp filter," },
        libc::EPERM if is_disabled() => Reason::Disabled { by: SWITCH },
        _ => Reason::Os(error),
    }
}

fn user_data(index: u32, generation: u32) -> u64 {
    // Indices stay far below 2^32 − 1, so this is never `WAKE` or `CANCEL`.
    u64::from(generation) << 32 | u64::from(index)
}

/// The slot's index, from the lower half of the user data.
fn slot_of(data: u64) -> u32 {
    u32::try_from(data & u64::from(u32::MAX)).unwrap_or(u32::MAX)
}

fn as_index(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}
