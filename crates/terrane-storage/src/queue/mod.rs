//! The I/O queue: one thread keeps several file reads and writes in flight.

mod entry;
mod options;
mod registered;
mod request;
mod ring;
mod transfer;
mod workers;

use std::fs::File;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Instant;

use terrane_core::{
    ByteCount, Capability, CapabilityReport, CapabilityStatus, OwnerProcess, Reason, RegionRequest,
};

pub use options::{IoBackend, IoQueueOptions};
pub use registered::{IoMemory, IoRegistration};
pub use request::{
    IoBuffer, IoCompletion, IoFailure, IoFailureReason, IoFile, IoOperation, IoRequest,
};

use crate::error::StorageError;
use crate::sys;
use crate::{SystemAllocator, SystemOptions};
use ring::Ring;
use transfer::{StopReason, Transfer};
use workers::{WakeSender, Workers};

/// A queue that keeps several file reads and writes in flight.
///
/// One thread at a time owns it. The thread submits requests until the queue is
/// [full](Self::has_room), waits for completions, and submits more. The backend is io_uring or, if
/// that is forbidden, a few threads. Both behave the same.
///
/// - **A request transfers all its bytes or fails.** The queue continues short reads and writes and
///   repeats interrupted calls. It splits lists with too many buffers or bytes for one system call.
///   A failure ([`IoFailure`]) has the file, the offset and the cause.
/// - **Submitting starts no request.** Requests start together at the next
///   [`flush`](Self::flush), [`poll`](Self::poll) or [`wait`](Self::wait). The only system call of a
///   submit is the [registration](IoMemory) of memory.
/// - **Requests are not ordered** among themselves. To order two requests, submit the second after
///   the first has completed.
/// - **A deadline or cancellation never ends the use of a buffer early.** A request completes only
///   when the kernel no longer uses its buffers. A request that a device is working on cannot be
///   cancelled, so its completion can come after the deadline. If all bytes were transferred, it is
///   reported as a success. [`poll`](Self::poll) and [`wait`](Self::wait) check the deadlines.
/// - **The submitting thread must stay alive** until its requests have completed. With io_uring the
///   kernel cancels the requests of a thread that exits. They are reported as `ECANCELED`.
/// - **Dropping the queue** cancels the requests in flight and waits until all have ended.
/// - **If the kernel refuses `io_uring_enter`, the queue ends.** A sandbox that starts after the
///   queue was created can cause this. Requests that the kernel has not taken fail with that error.
///   The others complete normally. A new queue then uses threads.
/// - **In a forked process** the parent's queue fails every call with [`StorageError::Forked`].
///   Dropping it there does not affect the parent.
///
/// Writing past `RLIMIT_FSIZE` makes the kernel send `SIGXFSZ`. The signal ends a process that does
/// not handle or ignore it. A process that ignores it gets the failure `EFBIG`. A
/// [`DiskFile`](crate::DiskFile) is never created longer than that limit.
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
    /// Dropped in the owner process only: a forked process has neither the ring's memory nor the
    /// threads.
    backend: ManuallyDrop<Backend>,
    owner: OwnerProcess,
    depth: usize,
    /// Requests that ended without a system call.
    ended: Vec<IoCompletion>,
    capabilities: CapabilityReport,
    wants_registration: bool,
}

// SAFETY: no part of the queue is tied to the thread that created it. The compiler cannot derive
// this because of the lists of `iovec`. Unused lists are empty. `Transfer`, which is `Send`, owns
// the lists in use; the submitter of the request owns their buffers.
unsafe impl Send for IoQueue {}

enum Backend {
    Ring(Box<Ring>),
    Workers(Box<Workers>),
}

impl IoQueue {
    /// Creates a queue with these options.
    ///
    /// # Errors
    ///
    /// [`StorageError::Capability`] if io_uring is required and refused,
    /// [`StorageError::QueueDepth`] if the depth is not supported, [`StorageError::Thread`] if a
    /// thread cannot be started.
    pub fn new(options: &IoQueueOptions) -> Result<Self, StorageError> {
        let depth = options.checked_depth()?;
        let mut capabilities = CapabilityReport::default();
        let requirement = options.backend.requirement();
        let ring = match options.backend {
            IoBackend::Threads => None,
            IoBackend::Auto | IoBackend::IoUring => Some(Ring::new(options)),
        };
        if let Some(Err(reason)) = &ring {
            tracing::debug!(%reason, "io_uring refused");
        }
        let status = CapabilityStatus::of(ring.as_ref());
        capabilities.record(Capability::IoUring, requirement, status);
        capabilities.check()?;
        let backend = match ring.and_then(Result::ok) {
            Some(ring) => Backend::Ring(Box::new(ring)),
            None => {
                Backend::Workers(Box::new(Workers::new(depth, options.threads.clamp(1, depth))?))
            }
        };
        let (backend, owner) = (ManuallyDrop::new(backend), OwnerProcess::current());
        let wants_registration = !options.registered.is_zero();
        Ok(Self { backend, owner, depth, ended: Vec::new(), capabilities, wants_registration })
    }

    /// The capability request for io_uring, with its result. If it was not granted, the queue uses
    /// threads.
    #[must_use]
    pub const fn capabilities(&self) -> &CapabilityReport {
        &self.capabilities
    }

    /// The maximum number of requests in flight.
    #[must_use]
    pub const fn depth(&self) -> usize {
        self.depth
    }

    /// The number of submitted requests whose completions have not been returned yet.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ended.len()
            + match &*self.backend {
                Backend::Ring(ring) => ring.in_flight(),
                Backend::Workers(workers) => workers.in_flight(),
            }
    }

    /// Whether the queue has room for another request.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.in_flight() < self.depth
    }

    /// Submits a request. This does not wait for I/O. The request starts at the next
    /// [`flush`](Self::flush), [`poll`](Self::poll) or [`wait`](Self::wait). If it is the one after
    /// which its [memory](IoRequest::memory) is registered, the kernel first pins up to 1 GiB.
    ///
    /// A request without bytes, or with a deadline that has passed, completes without a system
    /// call.
    ///
    /// # Safety
    ///
    /// The following must hold until the completion of the request has been returned or the drop of
    /// the queue has returned, whichever comes first:
    ///
    /// - The buffers are valid for their lengths: for writes if the request reads the file, for
    ///   reads if it writes. No other code writes them. No other code reads them while the request
    ///   fills them.
    /// - The descriptor stays open and refers to the same file.
    /// - The [memory](IoRequest::memory) of the request, if it is stated, exists.
    ///
    /// # Errors
    ///
    /// After an error nothing was submitted, and the safety requirements no longer apply.
    ///
    /// [`StorageError::QueueFull`] if as many requests as the depth allows are in flight.
    /// [`StorageError::OffsetOutOfRange`] or [`StorageError::Overflow`] if the request leaves the
    /// range of file offsets. [`StorageError::Queue`] if the kernel refuses `io_uring_enter`.
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
            Err(transfer.stopped(StopReason::Deadline))
        } else {
            return match &mut *self.backend {
                Backend::Ring(ring) => ring.submit(transfer, request.memory),
                Backend::Workers(workers) => workers.submit(transfer),
            };
        };
        self.ended.push(IoCompletion { token: request.token, outcome });
        Ok(())
    }

    /// Starts all submitted requests with one system call.
    ///
    /// # Errors
    ///
    /// [`StorageError::Queue`] if the kernel refuses. The next [`wait`](Self::wait) or
    /// [`poll`](Self::poll) ends the requests that the kernel has not taken.
    /// [`StorageError::Forked`] in a forked process.
    pub fn flush(&mut self) -> Result<(), StorageError> {
        self.owner.check()?;
        match &mut *self.backend {
            Backend::Ring(ring) => ring.flush(),
            // A worker starts each request as soon as it receives it.
            Backend::Workers(_) => Ok(()),
        }
    }

    /// Starts the submitted requests and appends the available completions. It never blocks.
    /// Returns how many it appended.
    ///
    /// # Errors
    ///
    /// As for [`wait`](Self::wait).
    pub fn poll(&mut self, completions: &mut Vec<IoCompletion>) -> Result<usize, StorageError> {
        self.wait(Some(Instant::now()), completions)
    }

    /// Starts the submitted requests. Waits until at least one request has completed, the time
    /// `until` has come, or the [waker](Self::waker) was used. Appends the completions and returns
    /// how many it appended.
    ///
    /// With nothing in flight it returns at once.
    ///
    /// # Errors
    ///
    /// [`StorageError::Queue`] if the kernel refuses `io_uring_enter`. The appended completions are
    /// valid. They include the failures of the requests that the kernel has not taken. The requests
    /// that it has taken stay in flight: later waits append their completions and succeed.
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
        match &mut *self.backend {
            Backend::Ring(ring) => ring.wait(until, completions)?,
            Backend::Workers(workers) => workers.wait(until, completions)?,
        }
        tracing::trace!(completions = completions.len() - before, "queue waited");
        Ok(completions.len() - before)
    }

    /// Requests cancellation of the requests with this token. They still complete: as
    /// [`IoFailureReason::Cancelled`], or with their normal result if they had already ended.
    ///
    /// # Errors
    ///
    /// [`StorageError::Queue`] if the kernel refuses the request. The requests that the kernel has
    /// taken continue. [`StorageError::Forked`] in a forked process.
    pub fn cancel(&mut self, token: u64) -> Result<(), StorageError> {
        self.owner.check()?;
        match &mut *self.backend {
            Backend::Ring(ring) => ring.stop(StopReason::Caller, |t| t.token == token),
            Backend::Workers(workers) => {
                workers.stop(|candidate| candidate == token);
                Ok(())
            }
        }
    }

    /// Whether the queue registers memory, from any thread.
    #[must_use]
    pub fn registration(&self) -> IoRegistration {
        match &*self.backend {
            Backend::Ring(ring) => ring.registration(),
            Backend::Workers(_) => IoRegistration::without_table(
                self.wants_registration.then_some(Reason::Needs("io_uring")),
            ),
        }
    }

    /// Counts a use of buffers in `memory`, as if a request had used them. The queue registers a
    /// chunk of the memory after as many bytes of it have been used as it has.
    pub fn note_use(&mut self, memory: &IoMemory, buffers: &[IoBuffer]) {
        if let Backend::Ring(ring) = &mut *self.backend {
            ring.note_use(memory, buffers);
        }
    }

    /// Allocates memory of this size, registers it, and frees it. Returns whether the kernel
    /// granted that. A size above 1 GiB is never granted, because it exceeds one registration.
    ///
    /// # Errors
    ///
    /// As for [`SystemAllocator::allocate_memory`]. [`StorageError::Forked`] in a forked process.
    pub fn try_registration(&mut self, bytes: ByteCount) -> Result<CapabilityStatus, StorageError> {
        self.owner.check()?;
        if matches!(*self.backend, Backend::Workers(_)) {
            return Ok(self.registration().status());
        }
        let allocator = SystemAllocator::new(SystemOptions::default());
        let memory = allocator.allocate_memory(&RegionRequest::new(bytes))?;
        let range = IoBuffer { address: memory.address(), length: bytes };
        // SAFETY: the memory keeps its pages until it drops, which is after this value.
        let io_memory = unsafe { IoMemory::new(range) };
        self.note_use(&io_memory, &[range]);
        let registered = io_memory.registered();
        Ok(match self.registration().status() {
            CapabilityStatus::Granted if registered < bytes => {
                let (needed, available) = (bytes, registered);
                CapabilityStatus::Refused(Reason::Exhausted { needed, available })
            }
            status => status,
        })
    }

    /// A handle with which any thread can end a [`wait`](Self::wait) of this queue.
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
            // SAFETY: nothing uses the backend after this, and this runs only once.
            unsafe { ManuallyDrop::drop(&mut self.backend) };
        }
    }
}

terrane_core::debug_fields!(IoQueue, |it| { capabilities: it.capabilities, depth: it.depth, in_flight: it.in_flight() });

/// Ends a [`wait`](IoQueue::wait) from another thread.
///
/// If no thread waits, a wake ends the next wait that finds requests in flight. The waker may
/// outlive its queue. It then does nothing, as in a forked process.
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
    /// Ends the current wait, or the next one if no thread waits.
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

terrane_core::debug_fields!(IoWaker {});
