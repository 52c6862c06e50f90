//! The table of the buffers that are registered with a ring.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use io_uring::{IoUring, Probe, opcode};
use terrane_core::convert::to_u64;
use terrane_core::sync::lock;
use terrane_core::{OsError, OwnerProcess};

use crate::sys;

/// The entries of a table. The kernel's limit is 16,384.
const ENTRIES: u16 = 4096;

/// The table of a ring. The queue, and the memory that is registered, share it.
pub(super) struct BufferTable {
    owner: OwnerProcess,
    state: Mutex<TableState>,
    pinned: AtomicU64,
    /// Whether the ring is open. It is read without the lock, which a thread holds while the kernel
    /// pins pages.
    is_open: AtomicBool,
    /// Whether the kernel has requests with several ranges of one registered buffer (Linux 6.15).
    pub(super) has_vectored: bool,
}

struct TableState {
    /// The ring; `None` after it has closed.
    ring: Option<RawFd>,
    free: Vec<u16>,
}

/// The reason why a buffer was not registered.
pub(super) enum NotRegistered {
    /// All entries are in use.
    Full,
    Os(OsError),
}

impl BufferTable {
    /// Creates the table of a ring, without buffers.
    pub(super) fn new(ring: &IoUring) -> Result<Arc<Self>, OsError> {
        let submitter = ring.submitter();
        submitter
            .register_buffers_sparse(u32::from(ENTRIES))
            .map_err(|error| OsError::from_io("io_uring_register", &error))?;
        let mut probe = Probe::new();
        let has_vectored = submitter.register_probe(&mut probe).is_ok()
            && probe.is_supported(opcode::ReadvFixed::CODE)
            && probe.is_supported(opcode::WritevFixed::CODE);
        let state = TableState { ring: Some(ring.as_raw_fd()), free: (0..ENTRIES).rev().collect() };
        Ok(Arc::new(Self {
            owner: OwnerProcess::current(),
            state: Mutex::new(state),
            pinned: AtomicU64::new(0),
            is_open: AtomicBool::new(true),
            has_vectored,
        }))
    }

    /// Whether this process has created the ring.
    pub(super) fn is_of_this_process(&self) -> bool {
        self.owner.is_current()
    }

    /// The bytes of all registered buffers.
    pub(super) fn pinned(&self) -> u64 {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Registers a range: the kernel pins its pages.
    pub(super) fn register(
        self: &Arc<Self>,
        (begin, length): (usize, usize),
    ) -> Result<RegisteredBuffer, NotRegistered> {
        let mut state = lock(&self.state);
        let (Some(ring), Some(index)) = (state.ring, state.free.pop()) else {
            return Err(NotRegistered::Full);
        };
        if let Err(error) = sys::ring::update_buffer(ring, index, (begin, length)) {
            state.free.push(index);
            return Err(NotRegistered::Os(error));
        }
        self.pinned.fetch_add(to_u64(length), Ordering::Relaxed);
        Ok(RegisteredBuffer { table: Arc::clone(self), index, length })
    }

    /// Unregisters all buffers, before the ring closes. The kernel would unpin them some time
    /// after.
    pub(super) fn close(&self) {
        self.is_open.store(false, Ordering::Relaxed);
        let mut state = lock(&self.state);
        let outcome = state.ring.take().map_or(Ok(()), sys::ring::unregister_buffers);
        self.pinned.store(0, Ordering::Relaxed);
        drop(state);
        if let Err(error) = outcome {
            tracing::debug!(%error, "the buffers of a ring were not unregistered before its end");
        }
    }
}

/// A buffer that is registered with a ring until it drops, or until the ring closes.
pub(super) struct RegisteredBuffer {
    table: Arc<BufferTable>,
    pub(super) index: u16,
    pub(super) length: usize,
}

impl RegisteredBuffer {
    pub(super) fn is_in_force(&self) -> bool {
        self.table.is_open.load(Ordering::Relaxed)
    }
}

impl Drop for RegisteredBuffer {
    fn drop(&mut self) {
        // A forked process shares the ring with its parent, whose buffers stay registered.
        if !self.table.owner.is_current() {
            return;
        }
        let mut state = lock(&self.table.state);
        let Some(ring) = state.ring else { return };
        let outcome = sys::ring::update_buffer(ring, self.index, (0, 0));
        if outcome.is_ok() {
            state.free.push(self.index);
            self.table.pinned.fetch_sub(to_u64(self.length), Ordering::Relaxed);
        }
        drop(state);
        // The pages then stay pinned until the ring closes. No other buffer gets the entry.
        if let Err(error) = outcome {
            tracing::warn!(%error, "a buffer could not be unregistered");
        }
    }
}
