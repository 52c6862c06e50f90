//! A job during its submission: its submitted chunks, and its next chunk.

mod end;
mod steps;
mod sums;

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use terrane_transfer::calibration::{CopyPath, Direction};
use terrane_transfer::{CopyFailure, CopyGrid, CopyJob};

use crate::engine::checksums::job_sums::JobSums;
use crate::engine::complete::failed_job::engine_failure;
use crate::engine::complete::progress::JobProgress;
use crate::engine::geometry::packing::Packing;
use crate::engine::path::choice::Corrections;
use crate::engine::resources::block_lists::{BlockLists, MAX_SMALL_PAIRS, list_bytes};
use crate::engine::resources::device_mapping::MappedEnds;
use crate::engine::resources::job_streams::{JobStreams, StreamLease};
use crate::engine::resources::scratch::Scratch;
use crate::engine::shared::Shared;
use crate::engine::submit::batch;
use crate::engine::submit::direction_queue::{DirectionQueue, SubmittedChunk};
use crate::engine::submit::order_event::{OrderEvent, PendingOrder};
use crate::engine::submit::submission::steps::{Staged, Steps, SubmittedCopies};
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::runtime::event::{Event, Timing};

/// A job, the progress of its submission, and the resources that it needs until it has ended.
pub(crate) struct Submission {
    /// The streams. For a path with one stream, the first carries all work. For the staged path,
    /// the first carries the copies and the second the kernels. They drop first, so that the job's
    /// resources outlive the work on them.
    streams: JobStreams,
    /// The buffer of the next chunk, if it needs one, or a buffer that failed work may still use. It
    /// returns to its direction.
    scratch: Option<(Scratch, Arc<DirectionQueue>)>,
    /// The block lists for the kernels, if a launch does not carry them.
    lists: Option<BlockLists>,
    /// The memory of these lists, before they are written.
    list_memory: Option<BlockLists>,
    /// The checksums, if some are requested.
    sums: Option<Box<JobSums>>,
    job: CopyJob,
    /// Keeps the kernels loaded if the engine drops while they run.
    kernels: Option<Kernels>,
    direction: Direction,
    path: CopyPath,
    /// The mappings of source and destination.
    ends: MappedEnds,
    /// The copy as strides; `None` if the driver copies run by run.
    grids: Arc<[CopyGrid]>,
    steps: Steps,
    /// The count of copied bytes; `None` while no chunk is counted apart from the job's end.
    count: Option<Arc<JobProgress>>,
    /// Events behind the latest chunks, with the total submitted bytes at each.
    marks: SmallVec<[(Event, u64); MARKS]>,
    submitted: u64,
    /// The number of submitted layers, counted from the first of the transfer.
    layers_submitted: u32,
    layers: Vec<(Range<u32>, Event)>,
    /// The corrections of the paths' costs, if its duration can correct them.
    sampled: Option<Arc<Corrections>>,
    /// Whether the whole job is submitted at once, to one stream.
    is_whole: bool,
}

/// The number of latest chunks that are kept.
const MARKS: usize = 4;
/// The bytes that travel while two threads wake up, one after the other. With no more bytes left,
/// the end is near.
const NEAR: u64 = 10 << 20;

impl Submission {
    /// Prepares a job without submitted work.
    pub(crate) fn new(
        shared: &Shared,
        job: CopyJob,
        direction: Direction,
        path: CopyPath,
        packing: Option<Packing>,
        ends: MappedEnds,
    ) -> Box<Self> {
        let grids = job.plan().grids().cloned().unwrap_or_default();
        let layer_by_layer = job.layers().is_some();
        let steps = match path {
            CopyPath::Staged => {
                match Staged::of(shared, job.plan(), &grids, direction, packing, layer_by_layer) {
                    Some(staged) => Steps::Staged(staged),
                    None => Steps::kernels(shared, job.plan(), &grids, direction, layer_by_layer),
                }
            }
            CopyPath::Direct | CopyPath::Relayout | CopyPath::Peer => {
                Steps::kernels(shared, job.plan(), &grids, direction, layer_by_layer)
            }
            CopyPath::Contiguous | CopyPath::CopyEach => Steps::runs(false),
            CopyPath::Batched => Steps::runs(true),
        };
        // Written in place: `Box::new` copies the value from the stack.
        Box::write(
            Box::new_uninit(),
            Self {
                streams: JobStreams::default(),
                scratch: None,
                lists: None,
                list_memory: None,
                sums: JobSums::of(shared, &job, direction, || steps.order(&grids)),
                count: None,
                job,
                kernels: shared.kernels.clone(),
                direction,
                path,
                ends,
                grids,
                steps,
                marks: SmallVec::new(),
                submitted: 0,
                layers_submitted: 0,
                layers: Vec::new(),
                sampled: None,
                is_whole: false,
            },
        )
    }

    pub(crate) fn job(&self) -> &CopyJob {
        &self.job
    }

    /// Makes the job, which has one stream, wait on the device for its order.
    ///
    /// # Errors
    ///
    /// The errors of the driver.
    pub(crate) fn wait_on(
        &mut self,
        stream: StreamLease,
        pending: &PendingOrder,
    ) -> Result<(), CudaError> {
        pending.delay(&stream)?;
        self.streams.push(stream);
        self.sums.iter_mut().for_each(|sums| sums.waits = true);
        Ok(())
    }

    /// Takes the streams for the next chunk. The job keeps them until it has ended.
    fn take_streams(&mut self, shared: &Shared) -> Result<(), CudaError> {
        let wanted = match &self.steps {
            Steps::Staged(staged) if !staged.is_only() => 2,
            _ => 1,
        };
        while self.streams.len() < wanted {
            self.streams.push(shared.streams.take()?);
        }
        Ok(())
    }

    /// Sets whether the job has the device to itself.
    pub(crate) fn sample_if(&mut self, is_alone: bool, shared: &Shared) {
        self.sampled = is_alone.then(|| Arc::clone(&shared.corrections));
    }

    /// Records that the whole job is submitted at once, to one stream, from here on.
    ///
    /// Threads that wait for such a short job poll its end themselves. The engine's thread that
    /// sleeps until the end records a separate event, which does not delay the poll or the
    /// submission.
    pub(crate) fn submit_whole(&mut self) {
        self.is_whole = true;
    }

    pub(crate) fn needs_scratch(&self) -> bool {
        matches!(self.steps, Steps::Staged(_))
    }

    /// Whether the whole job fits into one buffer, so that a few driver calls with one buffer
    /// suffice.
    pub(crate) fn fits_one_buffer(&self) -> bool {
        // Layers are reported one by one.
        match &self.steps {
            Steps::Staged(staged) => self.job.layers().is_none() && staged.fits_one_chunk(),
            _ => false,
        }
    }

    /// Submits the whole job as one chunk, in the [given](Self::put_scratch) buffer.
    pub(crate) fn in_one_chunk(&mut self) {
        if let Steps::Staged(staged) = &mut self.steps {
            staged.in_one_chunk();
        }
    }

    /// Continues without a buffer, on the first stream, if no buffer is available.
    ///
    /// The submitted chunks are copied again, from the same bytes to the same addresses. So layers
    /// that were already reported do not change.
    ///
    /// # Errors
    ///
    /// The errors of the driver.
    #[cold]
    pub(crate) fn do_without_scratch(&mut self, shared: &Shared) -> Result<(), CudaError> {
        if let [first, others @ ..] = &*self.streams
            && self.submitted > 0
        {
            // The end event must follow the first stream's last work. The sums of a destination
            // read bytes that are now copied again.
            for other in others.iter().chain(self.streams.sums_stream()) {
                first.wait_for(&Event::queried_after(other)?)?;
            }
        }
        let reached = self.kernels.is_some() && self.ends.iter().all(|end| end.has_kernels());
        let layer_by_layer = self.job.layers().is_some();
        self.steps = if reached {
            Steps::kernels(shared, self.job.plan(), &self.grids, self.direction, layer_by_layer)
        } else {
            Steps::runs(batch::is_supported(&shared.context))
        };
        if self.submitted > 0 {
            self.job.retried();
        }
        self.submitted = 0;
        self.sums.iter_mut().for_each(|sums| sums.restart());
        self.marks.clear();
        Ok(())
    }

    /// Whether a few driver calls submit the whole job, so that the caller's thread may do it.
    pub(crate) fn is_small(&self, shared: &Shared) -> bool {
        /// Copies; a call takes two microseconds.
        const MOST_COPIES: u64 = 3;
        /// Runs of a batch; each takes a third of a microsecond.
        const MOST_BATCHED: u64 = 16;
        /// The bytes of one buffer of the staged path, which one thread also submits. Their copy
        /// takes several times as long as a thread's wake-up.
        const MOST_BYTES: u64 = 32 << 20;
        /// Launches. A list of their pairs may be uploaded first.
        const MOST_LAUNCHES: usize = 8;
        let plan = self.job.plan();
        // One launch between devices copies up to a gigabyte, whichever thread submits it.
        let has_host = matches!(self.direction, Direction::ToDevice | Direction::ToHost);
        let is_large = has_host && plan.bytes().get() > MOST_BYTES;
        if self.job.layers().is_some() || is_large {
            return false;
        }
        match &self.steps {
            Steps::Runs { together, .. } => {
                let most = if *together { MOST_BATCHED } else { MOST_COPIES };
                plan.run_count() <= most && plan.bytes() <= shared.options.request_bytes
            }
            Steps::Kernels { chunker, .. } => {
                let fits =
                    || chunker.fits_one_chunk() || chunker.clone().nth(MOST_LAUNCHES).is_none();
                chunker.pairs() <= MAX_SMALL_PAIRS && fits()
            }
            Steps::Staged(_) => false,
        }
    }

    /// Takes the resources that the job needs besides streams, if they exist. Returns whether it
    /// has all of them. The submit thread allocates missing ones, so that no caller waits for an
    /// allocation.
    pub(crate) fn has_resources(&mut self, shared: &Shared) -> bool {
        let wants_lists = matches!(self.steps, Steps::Kernels { lists: true, .. });
        if wants_lists && self.list_memory.is_none() {
            let plan = self.job.plan();
            let bytes = list_bytes([plan.source_blocks(), plan.destination_blocks()]);
            self.list_memory = shared.lists.take(bytes);
        }
        (!wants_lists || self.list_memory.is_some()) && self.has_room_for_sums(shared)
    }

    /// Whether all chunks have been submitted.
    pub(crate) fn is_submitted(&self) -> bool {
        match &self.steps {
            Steps::Runs { next, .. } => *next >= self.job.plan().runs().len(),
            Steps::Kernels { chunker, .. } => chunker.is_done(),
            Steps::Staged(staged) => staged.is_submitted(),
        }
    }

    /// Gives the job the buffer of its next chunk.
    pub(crate) fn put_scratch(&mut self, scratch: Scratch, queue: &Arc<DirectionQueue>) {
        self.scratch = Some((scratch, Arc::clone(queue)));
    }

    /// Gives back a buffer that the job was given but did not need.
    pub(crate) fn give_back_scratch(&mut self) {
        if let Some((scratch, queue)) = self.scratch.take() {
            queue.give_back(scratch);
        }
    }

    /// Submits the next chunk, and returns the submitted work; `None` if no chunk is left. Without a
    /// [buffer](Self::put_scratch) nothing is staged.
    ///
    /// # Errors
    ///
    /// The failure. Some of the chunk may have been submitted, and may use the buffer.
    pub(crate) fn step(&mut self, shared: &Shared) -> Result<Option<SubmittedChunk>, CopyFailure> {
        if self.needs_scratch() && self.scratch.is_none() && !self.is_submitted() {
            self.do_without_scratch(shared).map_err(engine_failure)?;
        }
        self.take_streams(shared).map_err(engine_failure)?;
        self.streams.begin();
        let copies = match &mut self.steps {
            Steps::Runs { .. } => self.step_runs(shared)?,
            Steps::Kernels { .. } => self.step_kernels(shared).map_err(engine_failure)?,
            Steps::Staged(_) => self.step_staged(shared).map_err(engine_failure)?,
        };
        let Some(copies) = copies else { return Ok(None) };
        let SubmittedCopies { bytes, stream, layers } = copies;
        self.submitted += bytes;
        let event = self.mark(shared, stream, layers).map_err(engine_failure)?;
        if let Some((scratch, queue)) = self.scratch.take() {
            queue.lend(scratch, event.clone());
        }
        // The layers and the buffer do not wait for the sums. The end of the job does.
        if self.sums.is_some()
            && self.continue_sums(shared, stream, &event).map_err(engine_failure)?
        {
            let end = self.event_behind(shared, stream).map_err(engine_failure)?;
            self.marks.push((end, self.submitted));
        }
        // Only the end of a job that is submitted at once is counted.
        let job = &self.job;
        let new = || JobProgress::new(job);
        let count = (!self.is_whole).then(|| Arc::clone(self.count.get_or_insert_with(new)));
        Ok(Some(SubmittedChunk { event, bytes, count }))
    }

    /// Records an event after a stream's work so far, which is also the event of `layers`.
    fn mark(&mut self, shared: &Shared, stream: usize, layers: u32) -> Result<Event, CudaError> {
        let event = self.event_behind(shared, stream)?;
        if self.marks.len() == MARKS {
            self.marks.remove(0);
        }
        self.marks.push((event.clone(), self.submitted));
        if self.job.layers().is_some() && layers > self.layers_submitted {
            self.mark_layers(&event, layers);
        }
        Ok(event)
    }

    /// Records that `event` is behind the first `layers` layers.
    #[inline(never)]
    fn mark_layers(&mut self, event: &Event, layers: u32) {
        let first = self.job.plan().layers().start;
        let arrived = first + self.layers_submitted..first + layers;
        if let Some(signals) = self.job.layers() {
            signals.submitted(arrived.clone(), event.transfer_handle());
        }
        self.layers.push((arrived, event.clone()));
        self.layers_submitted = layers;
    }

    /// Records an event after a stream's work so far, of the kind that the end of this job needs.
    fn event_behind(&self, shared: &Shared, stream: usize) -> Result<Event, CudaError> {
        // Other buffers follow the first one, so a thread that waits for it may poll. An event that
        // cannot be slept on costs the calling thread a microsecond less.
        let is_first = self.needs_scratch() && self.marks.is_empty() && !self.is_submitted();
        let is_queried = self.is_whole || (is_first && self.job.layers().is_none());
        match self.streams.get(stream) {
            Some(stream) if is_queried => Event::queried_after(stream),
            stream => {
                let event = Event::new(&shared.context, Timing::Off)?;
                stream.map_or(Ok(()), |stream| event.record(stream))?;
                Ok(event)
            }
        }
    }

    /// Makes a job that copies nothing end when its order is satisfied.
    pub(crate) fn end_with(&mut self, order_event: OrderEvent) {
        let (event, stream) = order_event.into_parts();
        self.marks.push((event, 0));
        stream.into_iter().for_each(|stream| self.streams.push(stream));
    }
}
