//! The engine's streams: one or two for each transfer, so that none waits for another's work.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use terrane_core::sync::lock;

use crate::engine::geometry::index;
use crate::error::CudaError;
use crate::runtime::context::Context;
use crate::runtime::stream::{Stream, StreamPriority};

/// Streams that are created on first use, and kept.
#[derive(Debug)]
pub(crate) struct StreamPool {
    context: Context,
    priority: StreamPriority,
    max_streams: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    idle: Vec<Stream>,
    /// Streams that were returned while their work may still have waited.
    returned_busy: Vec<Stream>,
    /// The streams that several jobs may share: all of them, except those of jobs that wait.
    shareable: Vec<Stream>,
    /// The streams that are shared, once for each such job.
    shared: Vec<Stream>,
    /// The number of streams that exist or are being created.
    made: usize,
    next_shared: usize,
    /// The number of streams that are lent to jobs that wait on the device for their order.
    waiting: usize,
}

impl StreamPool {
    /// Creates a pool of at most `max_streams` streams. `ready` of them are created at once.
    ///
    /// # Errors
    ///
    /// The errors of creating a stream.
    pub(crate) fn new(
        context: &Context,
        priority: StreamPriority,
        max_streams: u32,
        ready: u32,
    ) -> Result<Arc<Self>, CudaError> {
        let make = |_| Stream::with_priority(context, priority);
        let idle = (0..ready.min(max_streams)).map(make).collect::<Result<Vec<_>, _>>()?;
        let (context, max_streams, made) = (context.clone(), index(max_streams), idle.len());
        let kept = Mutex::new(Kept { shareable: idle.clone(), idle, made, ..Kept::default() });
        Ok(Arc::new(Self { context, priority, max_streams, kept }))
    }

    /// Returns an idle stream. If there are enough streams already, it returns one with another
    /// transfer's work.
    ///
    /// # Errors
    ///
    /// The errors of creating a stream.
    pub(crate) fn take(self: &Arc<Self>) -> Result<StreamLease, CudaError> {
        if let Some(own) = self.take_own(Use::Own)? {
            return Ok(self.lease(own, Use::Own));
        }
        let mut kept = self.kept();
        let number = kept.next_shared % kept.shareable.len().max(1);
        kept.next_shared = number + 1;
        match kept.shareable.get(number).cloned() {
            Some(stream) => {
                kept.shared.push(stream.clone());
                Ok(self.lease(stream, Use::Shared))
            }
            // Another thread is creating the first one.
            None => {
                drop(kept);
                let own = Stream::with_priority(&self.context, self.priority)?;
                Ok(self.lease(own, Use::Shared))
            }
        }
    }

    /// Returns an idle stream; `None` if there are enough streams already.
    ///
    /// # Errors
    ///
    /// The errors of creating a stream.
    pub(crate) fn take_idle(self: &Arc<Self>) -> Result<Option<StreamLease>, CudaError> {
        Ok(self.take_own(Use::Own)?.map(|own| self.lease(own, Use::Own)))
    }

    /// Returns an idle stream that exists, for threads that must not create one.
    pub(crate) fn take_ready(self: &Arc<Self>) -> Option<StreamLease> {
        let ready = self.kept().idle.pop();
        ready.map(|own| self.lease(own, Use::Own))
    }

    /// Returns an idle stream for a job that will wait there; `None` if half of all streams already
    /// carry such jobs. Until the job returns it, no other job shares it. So no job waits for
    /// another job's compute, and streams remain for jobs that need not wait.
    ///
    /// # Errors
    ///
    /// The errors of creating a stream.
    pub(crate) fn take_to_wait(self: &Arc<Self>) -> Result<Option<StreamLease>, CudaError> {
        {
            let mut kept = self.kept();
            if kept.waiting >= self.max_streams / 2 {
                return Ok(None);
            }
            kept.waiting += 1;
        }
        let own = self.take_own(Use::Waiting);
        if !matches!(own, Ok(Some(_))) {
            self.kept().waiting -= 1;
        }
        Ok(own?.map(|own| self.lease(own, Use::Waiting)))
    }

    /// An idle stream, or a new one, created while other threads take theirs; `None` if there are
    /// enough.
    fn take_own(&self, used: Use) -> Result<Option<Stream>, CudaError> {
        {
            let mut kept = self.kept();
            if let Some(free) = kept.take_free(used) {
                return Ok(Some(free));
            }
            if kept.made >= self.max_streams.max(1) {
                return Ok(None);
            }
            kept.made += 1;
        }
        match Stream::with_priority(&self.context, self.priority) {
            Ok(stream) => {
                if used != Use::Waiting {
                    self.kept().shareable.push(stream.clone());
                }
                Ok(Some(stream))
            }
            Err(error) => {
                self.kept().made -= 1;
                Err(error)
            }
        }
    }

    fn lease(self: &Arc<Self>, stream: Stream, used: Use) -> StreamLease {
        StreamLease { stream, pool: Arc::clone(self), used, is_held: false }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        lock(&self.kept)
    }
}

impl Kept {
    /// Takes a stream that exists and has no job of its own. A job that will wait gets none that
    /// others share, because their next work would wait too.
    fn take_free(&mut self, used: Use) -> Option<Stream> {
        let is_waiting = used == Use::Waiting;
        let fits = |stream: &Stream| !(is_waiting && position(&self.shared, stream).is_some());
        let free = if let Some(idle) = self.idle.iter().rposition(fits) {
            self.idle.remove(idle)
        } else {
            // A stream whose query fails stays where it is.
            let is_free = |stream: &Stream| fits(stream) && stream.is_idle().unwrap_or(false);
            let free = self.returned_busy.iter().position(is_free)?;
            self.returned_busy.swap_remove(free)
        };
        if is_waiting && let Some(number) = position(&self.shareable, &free) {
            self.shareable.swap_remove(number);
        }
        Some(free)
    }
}

/// The place of a stream in a list.
fn position(streams: &[Stream], stream: &Stream) -> Option<usize> {
    streams.iter().position(|other| other.handle() == stream.handle())
}

/// The way in which a stream is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// To one job.
    Own,
    /// To one job, which waits on it.
    Waiting,
    /// To several jobs.
    Shared,
}

/// A stream of the engine, returned when it drops. Its submitted work continues.
#[derive(Debug)]
pub(crate) struct StreamLease {
    stream: Stream,
    pool: Arc<StreamPool>,
    used: Use,
    /// Whether it may wait for another library's event.
    is_held: bool,
}

impl StreamLease {
    /// Records that the stream waits for another library, which may take long. No other job
    /// gets it before that wait has ended.
    pub(crate) fn hold(&mut self) {
        self.is_held = true;
    }

    /// Records that the wait has ended.
    pub(crate) fn release(&mut self) {
        self.is_held = false;
    }
}

impl std::ops::Deref for StreamLease {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for StreamLease {
    fn drop(&mut self) {
        if self.pool.context.driver().is_of_parent() {
            return;
        }
        let kept = &mut *self.pool.kept();
        match self.used {
            Use::Own => {}
            Use::Waiting => {
                kept.waiting -= 1;
                kept.shareable.push(self.stream.clone());
            }
            Use::Shared => {
                if let Some(number) = position(&kept.shared, &self.stream) {
                    kept.shared.swap_remove(number);
                }
                return;
            }
        }
        let returned = if self.is_held { &mut kept.returned_busy } else { &mut kept.idle };
        returned.push(self.stream.clone());
    }
}

/// The streams of one job. A drop waits for the job's work, if any may be submitted. This applies
/// to every end of a job, including panics. A job's resources are declared after its streams, so
/// they outlive the submitted work.
#[derive(Debug, Default)]
pub(crate) struct JobStreams {
    streams: SmallVec<[StreamLease; 2]>,
    /// The stream of the job's checksums.
    sums_stream: Option<StreamLease>,
    is_used: bool,
}

impl JobStreams {
    /// Adds a stream.
    pub(crate) fn push(&mut self, stream: StreamLease) {
        self.streams.push(stream);
    }

    /// The stream of the job's checksums alone, if there is one.
    pub(crate) fn sums_stream(&self) -> Option<&StreamLease> {
        self.sums_stream.as_ref()
    }

    /// Sets the separate stream for the checksums.
    pub(crate) fn set_sums_stream(&mut self, stream: Option<StreamLease>) {
        self.sums_stream = stream;
    }

    /// Records that work of the job is about to be submitted.
    pub(crate) fn begin(&mut self) {
        self.is_used = true;
    }

    /// Records that no work of the job is on the device any more.
    pub(crate) fn mark_idle(&mut self) {
        self.is_used = false;
    }

    /// Queries whether any work of the job may still be on the device. Never blocks.
    pub(crate) fn state(&mut self) -> StreamState {
        if !self.is_used {
            return StreamState::Idle;
        }
        for stream in self.streams.iter().chain(&self.sums_stream) {
            match stream.is_idle() {
                Ok(true) => {}
                Ok(false) => return StreamState::Busy,
                // No work runs in a lost context, and none for a forked process.
                Err(error) if error.is_context_lost() => break,
                Err(CudaError::Forked) => break,
                // Any other error concerns the query, and proves nothing about the work.
                Err(error) => return StreamState::Unknown(error),
            }
        }
        self.is_used = false;
        StreamState::Idle
    }

    /// Waits for the submitted work, if there is any, however long that takes.
    ///
    /// # Errors
    ///
    /// The reason why it is unknown whether the work has ended, after repeated queries.
    pub(crate) fn wait_idle(&mut self) -> Result<(), CudaError> {
        let mut backoff = Backoff::default();
        let mut unanswered = UnansweredQueries::default();
        loop {
            match self.state() {
                StreamState::Idle => return Ok(()),
                StreamState::Busy => unanswered = UnansweredQueries::default(),
                StreamState::Unknown(error) if unanswered.last_too_long() => return Err(error),
                StreamState::Unknown(_) => {}
            }
            backoff.take();
        }
    }
}

/// Whether a job's work has left the device.
#[derive(Debug)]
pub(crate) enum StreamState {
    /// Its work has left the device.
    Idle,
    /// Its work is still on the device.
    Busy,
    /// The driver returned an error.
    Unknown(CudaError),
}

/// The time since which the driver has answered no query. A time and not a count, because some
/// threads query much more often than others.
#[derive(Debug, Default)]
pub(crate) struct UnansweredQueries(Option<Instant>);

impl UnansweredQueries {
    /// Records another such query. Returns whether the first one was too long ago.
    pub(crate) fn last_too_long(&mut self) -> bool {
        const LONGEST: Duration = Duration::from_secs(3);
        self.0.get_or_insert_with(Instant::now).elapsed() > LONGEST
    }
}

/// Sleeps between queries. Each sleep is twice as long as the one before, up to 10 ms.
#[derive(Debug, Default)]
pub(crate) struct Backoff(u32);

impl Backoff {
    pub(crate) fn take(&mut self) {
        const FIRST: Duration = Duration::from_micros(20);
        const LONGEST_DOUBLING: u32 = 9;
        std::thread::sleep(FIRST * (1 << self.0));
        self.0 = (self.0 + 1).min(LONGEST_DOUBLING);
    }
}

impl std::ops::Deref for JobStreams {
    type Target = [StreamLease];

    fn deref(&self) -> &[StreamLease] {
        &self.streams
    }
}

impl Drop for JobStreams {
    fn drop(&mut self) {
        // The device may use the resources that drop after this until the work has completed. The
        // drop therefore blocks until the driver answers.
        while self.wait_idle().is_err() {}
    }
}
