//! Reads and writes blocks in slab files.
//!
//! A slab file is a row of slots of one size, without headers. A group has one in each directory, and
//! its slots alternate between them. One thread, named `terrane-store-io`, keeps requests in flight,
//! computes the checksums of the blocks that it writes, and verifies those that it reads.

mod bounce;
mod counts;
mod cut;
mod files;
mod health;
mod inbox;
mod memory;
mod options;
mod request;
#[cfg(test)]
mod tests;
mod waiting;
mod worker;

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Instant;

use terrane_core::sync::lock;
use terrane_core::{
    Alignment, Capability, CapabilityReport, ForkedProcess, OsError, OwnerProcess, Requirement,
};
use terrane_storage::{IoQueue, IoQueueOptions, IoRegistration, StorageError};

use crate::disk::GroupSlots;
use crate::error::StoreError;
use counts::IoCounts;
use files::SlabFiles;
use health::HealthState;
use inbox::{Inbox, Message};
pub(crate) use options::SlabOptions;
pub use request::{JobId, Priority};
pub(crate) use request::{
    SlabBuffers, SlabDirection, SlabDone, SlabFailure, SlabRequest, SlabSink,
};
use worker::Worker;

/// The slab files of a store, and the thread that reads and writes them. Clones share them.
///
/// Dropping the last clone closes it, as [`close`](Self::close) does with a deadline that has passed.
#[derive(Clone)]
pub(crate) struct Slabs {
    handle: Arc<Handle>,
}

/// The state that the callers and the thread share.
struct Shared {
    files: SlabFiles,
    health: HealthState,
    counts: IoCounts,
    inbox: Inbox,
}

struct Handle {
    /// A forked process has no copy of the thread, so nothing of this is dropped there.
    shared: ManuallyDrop<Arc<Shared>>,
    thread: ManuallyDrop<Mutex<Option<JoinHandle<()>>>>,
    thread_id: ThreadId,
    owner: OwnerProcess,
    capabilities: CapabilityReport,
    registration: IoRegistration,
}

impl Slabs {
    /// Opens `slab.GROUP.NNN` in each of `folders`, which exist, and starts the thread. `NNN` is the
    /// folder's index. Files that do not exist are created, and files that are too short are extended.
    /// Their disk blocks are reserved where the file system can.
    ///
    /// # Errors
    ///
    /// [`StoreError::NoDirectory`], [`StoreError::SlotsTooLarge`], [`StoreError::SlotAlignment`] if direct
    /// I/O is required and needs a larger one, [`StoreError::SlabFile`], and
    /// [`StoreError::Storage`]: with `NoSpace` if the disk cannot hold the files.
    pub(crate) fn open(
        folders: &[PathBuf],
        groups: &[GroupSlots],
        options: &SlabOptions,
    ) -> Result<Self, StoreError> {
        let files = SlabFiles::open(folders, groups, options)?;
        let queue = IoQueue::new(&IoQueueOptions {
            depth: options.depth,
            backend: options.backend,
            registered: options.registered,
            ..IoQueueOptions::default()
        })?;
        let mut capabilities = files.capabilities.clone();
        capabilities.extend(queue.capabilities().outcomes().iter().cloned());
        let health = HealthState::default();
        if options.read_only {
            health.make_read_only(StoreError::ReadOnly);
        }
        let shared = Arc::new(Shared {
            files,
            health,
            counts: IoCounts::default(),
            inbox: Inbox::new(queue.waker()),
        });
        let registration = queue.registration();
        let worker = Worker::new(queue, Arc::clone(&shared), options);
        let refuse = RefuseOnExit(Arc::clone(&shared));
        let serve = move || {
            let _refuse = refuse;
            worker.serve();
        };
        let thread = thread::Builder::new()
            .name("terrane-store-io".to_owned())
            .spawn(serve)
            .map_err(|error| StorageError::Thread { source: OsError::from_io("clone", &error) })?;
        let handle = Handle {
            shared: ManuallyDrop::new(shared),
            thread_id: thread.thread().id(),
            thread: ManuallyDrop::new(Mutex::new(Some(thread))),
            owner: OwnerProcess::current(),
            capabilities,
            registration,
        };
        Ok(Self { handle: Arc::new(handle) })
    }

    /// The alignment of slots in these folders: the recorded one, if the options have it, or that
    /// which direct I/O needs.
    ///
    /// # Errors
    ///
    /// [`StoreError::Storage`] if a folder cannot be used, and [`StoreError::SlotAlignment`].
    pub(crate) fn granule(
        folders: &[PathBuf],
        options: &SlabOptions,
    ) -> Result<Alignment, StoreError> {
        Ok(files::granule_for(folders, options)?.0)
    }

    /// The bytes between two slots of a group: its slot size, rounded up for direct I/O. 0 for a group
    /// that does not exist.
    pub(crate) fn slot_bytes(&self, group: u16) -> u64 {
        self.handle.shared.files.stride(group)
    }

    /// The bytes of all slab files.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.handle.shared.files.bytes()
    }

    /// The blocks to read and those to write that wait or are in the device, and the requests to it so far.
    pub(crate) fn io_numbers(&self) -> [u64; 3] {
        self.handle.shared.counts.get()
    }

    /// Queues requests. It never blocks on I/O.
    ///
    /// Each request ends by one call of its sink, on the I/O thread and without a lock. After a
    /// [`close`](Self::close) and in a forked process, the calls come on this thread, before the
    /// return.
    ///
    /// # Safety
    ///
    /// Until the sink is called for a request, its buffers are valid for their lengths: for writes if
    /// it reads the file, for reads if it writes. No other code writes them meanwhile, or reads what a
    /// read fills. The buffers of a write are initialized.
    #[expect(unsafe_code, reason = "the caller keeps the buffers valid")]
    pub(crate) unsafe fn submit(&self, requests: Vec<SlabRequest>) {
        if self.handle.owner.check().is_err() {
            let forked = Arc::new(StoreError::Forked(ForkedProcess));
            return refuse(requests, &SlabFailure::Refused(forked));
        }
        if let Err(Message::Submit(requests)) =
            self.handle.shared.inbox.send(Message::Submit(requests))
        {
            refuse(requests, &SlabFailure::Closed);
        }
    }

    /// Ends the requests of a job as [`SlabFailure::Cancelled`]. Requests in the device end when
    /// it has finished with them. A block that was transferred completely all the same is reported so.
    pub(crate) fn cancel(&self, job: JobId) {
        self.handle.send(Message::Cancel(job));
    }

    /// Raises the priority of a job's requests that were not started. It never lowers one.
    pub(crate) fn raise(&self, job: JobId, priority: Priority) {
        self.handle.send(Message::Raise(job, priority));
    }

    /// Makes everything durable whose end was reported before. It blocks.
    ///
    /// # Errors
    ///
    /// [`StoreError::SyncFailed`] if a file could not be synced, now or ever before: from then on the
    /// files are read-only. [`StoreError::Forked`].
    pub(crate) fn sync(&self) -> Result<(), StoreError> {
        self.handle.owner.check()?;
        let shared = &self.handle.shared;
        shared.files.sync().inspect_err(|error| {
            if let StoreError::SyncFailed { path, source } = error {
                let (path, source) = (path.clone(), *source);
                shared.health.make_read_only(StoreError::SyncFailed { path, source });
            }
        })
    }

    /// Frees the disk blocks of these slots. They read as zeros until they are written.
    ///
    /// # Errors
    ///
    /// [`StoreError::SlabFile`] if the file system cannot. [`StoreError::Forked`].
    pub(crate) fn punch(&self, group: u16, slots: Range<u32>) -> Result<(), StoreError> {
        self.handle.owner.check()?;
        self.handle.shared.files.punch(group, slots)
    }

    /// Why a block cannot be written now: [`SlabFailure::ReadOnly`], or [`SlabFailure::Refused`] if it
    /// cannot be read either.
    pub(crate) fn refusal(&self) -> Option<SlabFailure> {
        match self.handle.owner.check() {
            Ok(()) => self.handle.shared.health.refusal(true),
            Err(forked) => Some(SlabFailure::Refused(Arc::new(forked.into()))),
        }
    }

    /// The features that the file systems and the kernel granted: direct I/O, preallocation, io_uring,
    /// registered buffers. The last count as granted until the kernel refuses to register some memory.
    pub(crate) fn capabilities(&self) -> CapabilityReport {
        let mut report = self.handle.capabilities.clone();
        let status = self.handle.registration.status();
        report.record(Capability::RegisteredBuffers, Requirement::Preferred, status);
        report
    }

    /// Refuses further requests, ends those that were not started as [`SlabFailure::Closed`], waits for
    /// those in flight and joins the thread. At the deadline it cancels the requests in flight.
    ///
    /// On the I/O thread itself, in a sink, it does not wait. In a forked process it does nothing.
    pub(crate) fn close(&self, deadline: Instant) {
        self.handle.close(deadline);
    }
}

impl Handle {
    fn send(&self, message: Message) {
        if self.owner.is_current() {
            // A closed inbox has no requests that the message is about.
            let _ = self.shared.inbox.send(message);
        }
    }

    fn close(&self, deadline: Instant) {
        self.send(Message::Close(deadline));
        if !self.owner.is_current() || thread::current().id() == self.thread_id {
            return;
        }
        // A second caller waits here for the first.
        let mut thread = lock(&self.thread);
        if let Some(thread) = thread.take() {
            // A thread that panicked has ended too.
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    #[expect(unsafe_code, reason = "a forked process must not drop what the thread shares")]
    fn drop(&mut self) {
        if !self.owner.is_current() {
            return;
        }
        self.close(Instant::now());
        // SAFETY: nothing uses it after this, and this runs only once.
        unsafe { ManuallyDrop::drop(&mut self.shared) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.thread) };
    }
}

terrane_core::debug_fields!(Slabs, |it| { files: it.handle.shared.files });

/// Ends the requests that the thread did not take, when it ends.
struct RefuseOnExit(Arc<Shared>);

impl Drop for RefuseOnExit {
    fn drop(&mut self) {
        for message in self.0.inbox.abandon() {
            if let Message::Submit(requests) = message {
                refuse(requests, &SlabFailure::Closed);
            }
        }
    }
}

fn refuse(requests: Vec<SlabRequest>, failure: &SlabFailure) {
    for request in requests {
        request.sink.block_ended(request.index, Err(failure.clone()));
        request.sink.results_end();
    }
}
