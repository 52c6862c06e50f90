//! The I/O queue: several reads and writes of files in flight, from one thread.

mod options;
mod request;
mod ring;
mod transfer;
mod workers;

use std::fmt;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use terrane_core::{Capability, CapabilityReport, Grant, OwnerProcess};

pub use options::{ActiveBackend, IoBackend, IoQueueOptions};
pub use request::{
    IoBuffer, IoCompletion, IoFailure, IoFailureReason, IoFile, IoOperation, IoRequest,
};

use crate::error::StorageError;
use crate::sys;
use ring::Ring;
use transfer::{Stop, Transfer};
use workers::{WakeSender, Workers};

/// A queue of reads and writes, several of which are in flight at once.
///
/// It belongs to one thread at a time, which submits requests until the queue is
/// [full](Self::has_room), waits for completions, and submits more. Underneath is io_uring or,
/// where that is forbidden, a few threads; both behave alike.
///
/// - **A request transfers all its bytes or fails.** Short reads and writes are continued,
///   interrupted calls repeated, lists of more buffers and sizes of more bytes than one system
///   call takes are split. A failure ([`IoFailure`]) names the file, the offset and the cause.
/// - **Submitting makes no system call.** Requests start together at the next
///   [`flush`](Self::flush), [`poll`](Self::poll) or [`wait`](Self::wait).
/// - **Requests are not ordered** among themselves. What has to follow is submitted after the
///   completion of what it follows.
/// - **A deadline or cancellation never ends the use of a buffer early**: the request is reported
///   only when the kernel has stopped using its buffers. A device that is already working on a
///   request cannot be called off, so its completion can come later than the deadline; if all
///   bytes were transferred it is reported as the success that it is. Deadlines are looked at
///   within [`poll`](Self::poll) and [`wait`](Self::wait).
/// - **The thread that submits stays alive** until its requests have completed: with io_uring the
///   kernel cancels what a thread that ends has in flight, which is then reported as `ECANCELED`.
/// - **Dropping the queue** cancels what is in flight and waits until all of it has ended.
/// - **A kernel that refuses `io_uring_enter` ends the queue**, as a sandbox does that starts after
///   the queue was made. Requests that the kernel has not taken fail with that refusal; the
///   others complete as they would have. Another queue then serves on threads.
/// - **In a forked process** the queue of the parent refuses every call
///   ([`StorageError::Forked`]), and its drop leaves all to the parent.
///
/// Writing past `RLIMIT_FSIZE` makes the kernel send `SIGXFSZ`, which ends a process that does
/// not handle or ignore it; a process that ignores it gets the failure `EFBIG`. A
/// [`DiskFile`](crate::DiskFile) is never made longer than that limit.
///
/// ```
/// use std::os::fd::AsRawFd;
/// use std::ptr::NonNull;
/// use terrane_core::{ByteCount, FileIdentity, HostAddress};
/// use terrane_storage::{IoBuffer, IoFile, IoQueue, IoQueueOptions, IoRequest};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let file = tempfile::tempfile()?;
/// let identity = FileIdentity { file_system: 0, inode: 0 };
/// let target = IoFile { descriptor: file.as_raw_fd(), identity };
/// let mut text = *b"blocks";
/// let buffers = [IoBuffer {
///     address: HostAddress::new(NonNull::from(&mut text[0])),
///     length: ByteCount::from_usize(text.len()),
/// }];
///
/// let mut queue = IoQueue::new(&IoQueueOptions::default())?;
/// let mut completions = Vec::new();
/// // SAFETY: `text` and `file` outlive the wait below, and nothing else touches `text`.
/// unsafe { queue.submit(&IoRequest::write(1, target, ByteCount::ZERO, &buffers)) }?;
/// queue.wait(None, &mut completions)?;
/// assert_eq!((completions[0].token, &completions[0].outcome), (1, &Ok(())));
/// # Ok(())
/// # }
/// ```
pub struct IoQueue {
    /// Dropped in the owner alone: a forked process has neither the ring's memory nor the threads.
    backend: ManuallyDrop<Backend>,
    owner: OwnerProcess,
    depth: usize,
    /// Requests that ended without the kernel.
    ended: Vec<IoCompletion>,
    capabilities: CapabilityReport,
}

// SAFETY: nothing in the queue is tied to the thread that made it. What keeps the compiler from
// seeing so are lists of `iovec` that wait for reuse, which are empty; those in use are sent by
// `Transfer`, whose buffers belong to whoever submitted the request.
unsafe impl Send for IoQueue {}

enum Backend {
    Ring(Box<Ring>),
    Workers(Workers),
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waited {
    Done,
    Woken,
}

impl IoQueue {
    /// A queue with these options.
    ///
    /// # Errors
    ///
    /// [`StorageError::Capability`] if io_uring is required and refused,
    /// [`StorageError::QueueDepth`] for a depth that no queue can have,
    /// [`StorageError::Thread`] if a thread cannot be started.
    pub fn new(options: &IoQueueOptions) -> Result<Self, StorageError> {
        let depth = options.checked_depth()?;
        let mut capabilities = CapabilityReport::default();
        let wish = options.backend.wish();
        let ring = match options.backend {
            IoBackend::Threads => {
                capabilities.record(Capability::IoUring, wish, Grant::NotTried);
                None
            }
            IoBackend::Auto | IoBackend::IoUring => match Ring::new(options.depth) {
                Ok(ring) => {
                    capabilities.record(Capability::IoUring, wish, Grant::Granted);
                    Some(ring)
                }
                Err(reason) => {
                    tracing::debug!(%reason, "io_uring refused");
                    capabilities.record(Capability::IoUring, wish, Grant::Refused(reason));
                    capabilities.check()?;
                    None
                }
            },
        };
        let backend = match ring {
            Some(ring) => Backend::Ring(Box::new(ring)),
            None => Backend::Workers(Workers::new(depth, options.thread_count(depth))?),
        };
        let (backend, owner) = (ManuallyDrop::new(backend), OwnerProcess::current());
        Ok(Self { backend, owner, depth, ended: Vec::new(), capabilities })
    }

    /// What serves the requests.
    #[must_use]
    pub fn backend(&self) -> ActiveBackend {
        match *self.backend {
            Backend::Ring(_) => ActiveBackend::IoUring,
            Backend::Workers(_) => ActiveBackend::Threads,
        }
    }

    /// Whether io_uring was wished for, and what became of that.
    #[must_use]
    pub const fn capabilities(&self) -> &CapabilityReport {
        &self.capabilities
    }

    /// How many requests can be in flight at once.
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.depth
    }

    /// How many requests have been submitted whose completions have not been handed out.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ended.len()
            + match &*self.backend {
                Backend::Ring(ring) => ring.in_flight(),
                Backend::Workers(workers) => workers.in_flight(),
            }
    }

    /// Whether another request can be submitted now.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.in_flight() < self.depth
    }

    /// Submits a request. It never blocks; the request starts at the next
    /// [`flush`](Self::flush), [`poll`](Self::poll) or [`wait`](Self::wait).
    ///
    /// A request without bytes, and one whose deadline has passed, complete without reaching the
    /// kernel.
    ///
    /// # Safety
    ///
    /// Until the completion of the request has been handed out, or the drop of the queue has
    /// returned, whichever comes first:
    ///
    /// - the buffers are valid for writes (if reading) or reads (if writing) of their lengths,
    ///   and nobody else writes them, nor reads them while they are being filled;
    /// - the descriptor stays open and names the same file.
    ///
    /// # Errors
    ///
    /// After an error nothing was submitted, and the promise above ends.
    ///
    /// [`StorageError::QueueFull`] if as many requests as the depth allows are in flight,
    /// [`StorageError::OffsetOutOfRange`] or [`StorageError::Overflow`] if the request leaves
    /// the range of file offsets, [`StorageError::Queue`] if the kernel refuses to be entered.
    /// [`StorageError::Forked`] in a forked process.
    pub unsafe fn submit(&mut self, request: &IoRequest<'_>) -> Result<(), StorageError> {
        self.owner.check()?;
        if !self.has_room() {
            return Err(StorageError::QueueFull { depth: self.depth });
        }
        let vectors = match &mut *self.backend {
            Backend::Ring(ring) => ring.spare_vectors(),
            Backend::Workers(workers) => workers.spare_vectors(),
        };
        let transfer = Transfer::new(request, vectors)?;
        let outcome = if transfer.is_empty() {
            Ok(())
        } else if request.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            Err(transfer.stopped(Stop::Deadline))
        } else {
            return match &mut *self.backend {
                Backend::Ring(ring) => ring.submit(transfer),
                Backend::Workers(workers) => workers.submit(transfer),
            };
        };
        self.ended.push(IoCompletion { token: request.token, outcome });
        Ok(())
    }

    /// Starts everything that was submitted, with one system call for all of it.
    ///
    /// # Errors
    ///
    /// [`StorageError::Queue`] if the kernel refuses. The next [`wait`](Self::wait) or
    /// [`poll`](Self::poll) ends the requests that it has not taken.
    /// [`StorageError::Forked`] in a forked process.
    pub fn flush(&mut self) -> Result<(), StorageError> {
        self.owner.check()?;
        match &mut *self.backend {
            Backend::Ring(ring) => ring.flush(),
            // A worker starts on its request as soon as it has it.
            Backend::Workers(_) => Ok(()),
        }
    }

    /// Starts what was submitted and appends the completions that there are already. Never
    /// blocks. Says how many it appended.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn poll(&mut self, completions: &mut Vec<IoCompletion>) -> Result<usize, StorageError> {
        self.wait(Some(Instant::now()), completions)
    }

    /// Starts what was submitted and waits until at least one request has completed, `until` has
    /// come, or the [waker](Self::waker) was used. Appends the completions, and says how many.
    ///
    /// With nothing in flight it returns at once.
    ///
    /// # Errors
    ///
    /// [`StorageError::Queue`] if the kernel refuses to be entered. The completions appended
    /// count: among them are the failures of the requests that the kernel has not taken. Those
    /// that it has taken are still in flight; later waits append their completions and succeed.
    /// [`StorageError::Forked`] in a forked process.
    pub fn wait(
        &mut self,
        until: Option<Instant>,
        completions: &mut Vec<IoCompletion>,
    ) -> Result<usize, StorageError> {
        self.owner.check()?;
        let before = completions.len();
        let until = if self.ended.is_empty() { until } else { Some(Instant::now()) };
        completions.append(&mut self.ended);
        let waited = match &mut *self.backend {
            Backend::Ring(ring) => ring.wait(until, completions)?,
            Backend::Workers(workers) => workers.wait(until, completions)?,
        };
        tracing::trace!(?waited, completions = completions.len() - before, "queue waited");
        Ok(completions.len() - before)
    }

    /// Asks that the requests with this token end early. Their completions come as ever: as
    /// [`IoFailureReason::Cancelled`], or as what they were if they had come to an end already.
    ///
    /// # Errors
    ///
    /// [`StorageError::Queue`] if the kernel refuses to be asked. The requests that it has taken
    /// go on.
    /// [`StorageError::Forked`] in a forked process.
    pub fn cancel(&mut self, token: u64) -> Result<(), StorageError> {
        self.owner.check()?;
        match &mut *self.backend {
            Backend::Ring(ring) => ring.stop(Stop::Caller, |t| t.token == token),
            Backend::Workers(workers) => {
                workers.stop(Stop::Caller, |candidate, _| candidate == token);
                Ok(())
            }
        }
    }

    /// A handle by which any thread can end a [`wait`](Self::wait) of this queue.
    #[must_use]
    pub fn waker(&self) -> IoWaker {
        let wake = match &*self.backend {
            Backend::Ring(ring) => Wake::Event(ring.wake_event()),
            Backend::Workers(workers) => Wake::Message(workers.waker()),
        };
        IoWaker { wake, owner: self.owner }
    }
}

impl Drop for IoQueue {
    fn drop(&mut self) {
        if self.owner.is_current() {
            // SAFETY: nothing uses the backend after this, which runs once.
            unsafe { ManuallyDrop::drop(&mut self.backend) };
        }
    }
}

impl fmt::Debug for IoQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoQueue")
            .field("backend", &self.backend())
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

/// Ends a [`wait`](IoQueue::wait) from another thread.
///
/// A wake that comes while nobody waits ends the next wait that finds requests in flight. It
/// may outlive its queue, and then does nothing. Nor does it in a forked process.
#[derive(Clone)]
pub struct IoWaker {
    wake: Wake,
    owner: OwnerProcess,
}

#[derive(Clone)]
enum Wake {
    Event(Arc<File>),
    Message(WakeSender),
}

impl IoWaker {
    /// Ends the current wait, or the next one.
    pub fn wake(&self) {
        if !self.owner.is_current() {
            return;
        }
        match &self.wake {
            Wake::Event(event) => sys::event::signal(event),
            Wake::Message(sender) => sender.wake(),
        }
    }
}

impl fmt::Debug for IoWaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoWaker").finish_non_exhaustive()
    }
}
