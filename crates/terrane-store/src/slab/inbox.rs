//! The messages of callers to the I/O thread.

use std::sync::{Condvar, Mutex};
use std::time::Instant;

use terrane_core::sync::{lock, unpoisoned};
use terrane_storage::IoWaker;

use crate::slab::request::{JobId, Priority, SlabRequest};

/// A message to the I/O thread.
pub(super) enum Message {
    Submit(Vec<SlabRequest>),
    Cancel(JobId),
    Raise(JobId, Priority),
    /// The last message.
    Close(Instant),
}

/// The messages that the I/O thread has not taken.
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    arrived: Condvar,
    waker: IoWaker,
}

struct InboxState {
    messages: Vec<Message>,
    thread: ThreadState,
    is_closed: bool,
}

/// Where the I/O thread is, and how a message reaches it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ThreadState {
    /// It looks for messages before it waits.
    Running,
    /// It waits for messages only.
    Idle,
    /// It waits for completions.
    InQueue,
}

impl Inbox {
    pub(super) fn new(waker: IoWaker) -> Self {
        let thread = ThreadState::Running;
        let state = InboxState { messages: Vec::new(), thread, is_closed: false };
        Self { state: Mutex::new(state), arrived: Condvar::new(), waker }
    }

    /// Sends a message. It comes back if the inbox is closed.
    pub(super) fn send(&self, message: Message) -> Result<(), Message> {
        let mut state = lock(&self.state);
        if state.is_closed {
            return Err(message);
        }
        state.is_closed = matches!(message, Message::Close(_));
        state.messages.push(message);
        let thread = std::mem::replace(&mut state.thread, ThreadState::Running);
        drop(state);
        match thread {
            ThreadState::Running => {}
            ThreadState::Idle => self.arrived.notify_one(),
            ThreadState::InQueue => self.waker.wake(),
        }
        Ok(())
    }

    /// Closes the inbox and returns its messages: the thread has ended.
    pub(super) fn abandon(&self) -> Vec<Message> {
        let mut state = lock(&self.state);
        state.is_closed = true;
        std::mem::take(&mut state.messages)
    }

    /// Takes all messages. It waits for one if the thread is idle.
    pub(super) fn take(&self, is_idle: bool, messages: &mut Vec<Message>) {
        let mut state = lock(&self.state);
        state.thread = ThreadState::Running;
        while is_idle && state.messages.is_empty() {
            state.thread = ThreadState::Idle;
            state = unpoisoned(self.arrived.wait(state));
        }
        messages.append(&mut state.messages);
    }

    /// Announces a wait in the queue. `false` if messages came first.
    pub(super) fn enter_queue(&self) -> bool {
        let mut state = lock(&self.state);
        let is_empty = state.messages.is_empty();
        if is_empty {
            state.thread = ThreadState::InQueue;
        }
        is_empty
    }
}
