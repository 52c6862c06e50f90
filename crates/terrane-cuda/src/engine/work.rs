//! A job on its way to the device: what of it has been submitted, and what comes next.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;
use terrane_core::ByteCount;
use terrane_transfer::{CopyFailure, CopyGrid, CopyJob, EventHandle, Side, TransferPlan};

use super::Shared;
use super::batch::Batch;
use super::calibration::Direction;
use super::flight::{Cargo, Count, Flight, Lesson, engine_failure};
use super::launch::{KernelEnd, Launcher};
use super::options::CopyPath;
use super::packing::{Cutter, Packing, Part, Ramp};
use super::reach::Reach;
use super::scratch::Scratch;
use super::streams::StreamLease;
use crate::error::CudaError;
use crate::event::{Event, Timing};
use crate::kernels::Kernels;

/// A job, and how far it has been submitted.
pub(super) struct Work {
    job: CopyJob,
    /// They outlive the engine, if that goes while they run.
    kernels: Kernels,
    direction: Direction,
    path: CopyPath,
    /// Of source and destination.
    ends: [Arc<Reach>; 2],
    grid: CopyGrid,
    steps: Steps,
    /// The first one has all the work of a path of one stream; of the staged path, the first one
    /// has the copies and the second one the kernels.
    streams: SmallVec<[StreamLease; 2]>,
    count: Arc<Count>,
    /// Behind the latest chunks.
    last: [Option<Arc<Event>>; 2],
    /// Layers that have been submitted, counted from the first of the transfer.
    layers_submitted: u32,
    layers: VecDeque<(Range<u32>, Arc<Event>)>,
    /// Whether what it takes says something about its path.
    is_telling: bool,
}

enum Steps {
    /// The driver's copies, from the run of this number on, from that offset in it.
    Runs {
        next: usize,
        offset: u64,
        batch: Batch,
        together: bool,
    },
    /// Kernels that copy from one end to the other.
    Kernels {
        cutter: Cutter,
        ctas: u32,
    },
    Staged(Box<Staged>),
}

struct Staged {
    cutter: Cutter,
    packing: Packing,
    batch: Batch,
    /// The blocks in the order of the host's, where that is not the plan's: those of the source,
    /// and those of the destination.
    sorted: Option<[Vec<u32>; 2]>,
    is_first: bool,
}

/// A part of a job that is on a stream.
pub(super) struct Chunk {
    pub(super) event: Arc<Event>,
    pub(super) scratch: Option<Scratch>,
    pub(super) bytes: u64,
    pub(super) count: Arc<Count>,
}

/// The most calls of the driver for one chunk, and the most runs of one batch.
const MOST_CALLS: usize = 64;
const MOST_TOGETHER: usize = 4096;
/// What a layer-wise transfer puts together at most: an event costs as much as 50 KiB.
const LAYERS_TOGETHER: u64 = 4 << 20;

impl Work {
    /// Prepares a job, of which nothing has been submitted.
    ///
    /// # Errors
    ///
    /// The job, and why it cannot be executed.
    pub(super) fn new(
        shared: &Shared,
        job: CopyJob,
        direction: Direction,
        path: CopyPath,
        ends: [Arc<Reach>; 2],
    ) -> Result<Self, Box<(CopyJob, CudaError)>> {
        let grid = job.plan().grid();
        let layer_wise = job.layers().is_some();
        let steps = match path {
            CopyPath::Staged => {
                match Staged::of(shared, job.plan(), &grid, direction, layer_wise) {
                    Some(staged) => Steps::Staged(Box::new(staged)),
                    None => Steps::kernels(shared, job.plan(), &grid, direction, layer_wise),
                }
            }
            CopyPath::Direct | CopyPath::Relayout | CopyPath::Peer => {
                Steps::kernels(shared, job.plan(), &grid, direction, layer_wise)
            }
            CopyPath::Contiguous | CopyPath::CopyEach => Steps::runs(false),
            CopyPath::Batched => Steps::runs(true),
        };
        let wanted = if matches!(steps, Steps::Staged(_)) { 2 } else { 1 };
        let mut streams = SmallVec::new();
        for _ in 0..wanted {
            match shared.streams.take() {
                Ok(stream) => streams.push(stream),
                Err(error) => return Err(Box::new((job, error))),
            }
        }
        Ok(Self {
            count: Count::new(&job),
            job,
            kernels: shared.kernels.clone(),
            direction,
            path,
            ends,
            grid,
            steps,
            streams,
            last: [None, None],
            layers_submitted: 0,
            layers: VecDeque::new(),
            is_telling: false,
        })
    }

    pub(super) fn job(&self) -> &CopyJob {
        &self.job
    }

    pub(super) fn ends(&self) -> &[Arc<Reach>; 2] {
        &self.ends
    }

    pub(super) fn streams(&self) -> &[StreamLease] {
        &self.streams
    }

    /// Says that the job has the device to itself.
    pub(super) fn teach(&mut self) {
        self.is_telling = true;
    }

    pub(super) fn needs_scratch(&self) -> bool {
        matches!(self.steps, Steps::Staged(_))
    }

    /// Where no buffer can be had: goes on without.
    pub(super) fn do_without_scratch(&mut self, shared: &Shared) {
        let reached = self.ends.iter().all(|end| end.has_kernels());
        let layer_wise = self.job.layers().is_some();
        // Nothing has been submitted yet, or what has been is copied again.
        self.steps = if reached {
            Steps::kernels(shared, self.job.plan(), &self.grid, self.direction, layer_wise)
        } else {
            Steps::runs(super::batch::is_there(&shared.context))
        };
        self.layers_submitted = 0;
    }

    /// Whether all of it takes a few calls of the driver, and so may be submitted by the caller's
    /// thread.
    pub(super) fn is_small(&self, shared: &Shared) -> bool {
        /// Copies, each a call of two microseconds.
        const MOST_COPIES: u64 = 3;
        /// Runs of a batch, at a third of a microsecond each.
        const MOST_BATCHED: u64 = 16;
        const LEAST_LARGE: u64 = 16 << 20;
        let plan = self.job.plan();
        if self.job.layers().is_some() || plan.bytes().get() > LEAST_LARGE {
            return false;
        }
        match &self.steps {
            Steps::Runs { together, .. } => {
                let most = if *together { MOST_BATCHED } else { MOST_COPIES };
                plan.run_count() <= most && plan.bytes() <= shared.options.request_bytes
            }
            // A launch carries at least as many pairs.
            Steps::Kernels { cutter, .. } => {
                let mut parts = cutter.clone();
                parts.next().is_none_or(|part| part.pairs.len() <= 128) && parts.next().is_none()
            }
            Steps::Staged(_) => false,
        }
    }

    /// Submits the next part, and answers what of it is on its way; `None` if there is none left.
    ///
    /// # Errors
    ///
    /// What failed. Some of the part may have been submitted, and may use `scratch`.
    pub(super) fn step(
        &mut self,
        shared: &Shared,
        scratch: &mut Option<Scratch>,
    ) -> Result<Option<Chunk>, CopyFailure> {
        let stepped = match &mut self.steps {
            Steps::Runs { .. } => self.step_runs(shared)?,
            Steps::Kernels { .. } => self.step_kernels(shared).map_err(engine_failure)?,
            Steps::Staged(_) => match scratch {
                Some(scratch) => self.step_staged(shared, scratch).map_err(engine_failure)?,
                None => None,
            },
        };
        let Some(stepped) = stepped else { return Ok(None) };
        let Stepped { bytes, stream, layers } = stepped;
        let event = self.mark(shared, stream, layers).map_err(engine_failure)?;
        let count = Arc::clone(&self.count);
        Ok(Some(Chunk { event, scratch: scratch.take(), bytes, count }))
    }

    /// An event behind what a stream has been given, which is also that of `layers`.
    fn mark(
        &mut self,
        shared: &Shared,
        stream: usize,
        layers: u32,
    ) -> Result<Arc<Event>, CudaError> {
        let event = Arc::new(Event::new(&shared.context, Timing::Off)?);
        if let Some(stream) = self.streams.get(stream) {
            event.record(stream)?;
        }
        self.last = [Some(Arc::clone(&event)), self.last[0].take()];
        if let Some(signals) = self.job.layers().filter(|_| layers > self.layers_submitted) {
            let first = self.job.plan().layers().start;
            let arrived = first + self.layers_submitted..first + layers;
            let raw = ByteCount::from_usize(event.raw().expose_provenance()).get();
            // SAFETY: the event is one of this device, and its owner goes with the handle.
            let handle = unsafe { EventHandle::from_raw(shared.context.device().id, raw) };
            signals.submitted(arrived.clone(), handle, Arc::clone(&event) as _);
            self.layers.push_back((arrived, Arc::clone(&event)));
            self.layers_submitted = layers;
        }
        Ok(event)
    }

    /// Of a job that copies nothing: what its end is behind.
    pub(super) fn end_with(&mut self, event: Option<Event>) {
        self.last = [event.map(Arc::new), None];
    }

    /// All has been submitted.
    pub(super) fn into_flight(
        self,
        shared: &Shared,
        predicted: std::time::Duration,
    ) -> Result<Arc<Flight>, Box<Cargo>> {
        let (direction, path, is_telling) = (self.direction, self.path, self.is_telling);
        let Self { job, kernels, count, streams, ends, last: [end, before_end], layers, .. } = self;
        let corrections = || Arc::clone(&shared.corrections);
        let lesson =
            is_telling.then(|| Lesson { corrections: corrections(), direction, path, predicted });
        let cargo = Cargo { job, count, streams, ends, lesson, scratch: None, kernels };
        match end {
            Some(end) => Ok(Flight::new(cargo, end, before_end, layers)),
            None => Err(Box::new(cargo)),
        }
    }

    /// Part of it failed, and may still use `scratch`.
    pub(super) fn into_cargo(self, scratch: Option<Scratch>) -> Box<Cargo> {
        let Self { job, kernels, count, streams, ends, .. } = self;
        Box::new(Cargo { job, count, streams, ends, lesson: None, scratch, kernels })
    }

    fn step_runs(&mut self, shared: &Shared) -> Result<Option<Stepped>, CopyFailure> {
        let Steps::Runs { next, offset, batch, together } = &mut self.steps else {
            return Ok(None);
        };
        let Some(stream) = self.streams.first() else { return Ok(None) };
        let plan = self.job.plan();
        let most = if *together { MOST_TOGETHER } else { MOST_CALLS };
        let limit = shared.options.request_bytes.get().max(1);
        let (mut bytes, mut calls) = (0, 0);
        let first = (*next, *offset);
        while let Some(run) = plan.runs().get(*next).filter(|_| bytes < limit && calls < most) {
            let left = run.bytes().get() - *offset;
            let places = [(Side::Source, &self.ends[0]), (Side::Destination, &self.ends[1])];
            let mut length = left.min(limit - bytes);
            let [source, destination] = places.map(|(side, reach)| {
                let at = run.at(side);
                let address = reach.copy_address(at.region, at.offset + *offset)?;
                length = reach.unsplit(address, length);
                Some(address)
            });
            let (Some(source), Some(destination)) = (source, destination) else {
                let device = shared.context.device().id;
                return Err(engine_failure(CudaError::NotReached { device }));
            };
            batch.push(source, destination, length);
            calls += 1;
            bytes += length;
            (*next, *offset) =
                if length == left { (*next + 1, 0) } else { (*next, *offset + length) };
        }
        if calls == 0 {
            return Ok(None);
        }
        let submitted = if *together {
            // SAFETY: the plan's runs lie within the regions of both ends, which the job keeps
            // alive until the stream has come past; its claims keep others off them.
            unsafe { batch.submit(stream) }
        } else {
            // SAFETY: as above.
            unsafe { batch.submit_one_by_one(stream) }
        };
        if let Err(error) = submitted {
            let (index, offset) = first;
            let (offset, source) = (ByteCount::new(offset), Box::new(error));
            return Err(CopyFailure::Run { index, offset, source });
        }
        let next_layer = plan.runs().get(*next).map(|run| plan.layer(run) - plan.layers().start);
        let layers = next_layer.unwrap_or(plan.layers().end - plan.layers().start);
        Ok(Some(Stepped { bytes, stream: 0, layers }))
    }

    fn step_kernels(&mut self, shared: &Shared) -> Result<Option<Stepped>, CudaError> {
        let Steps::Kernels { cutter, ctas } = &mut self.steps else { return Ok(None) };
        let (Some(part), Some(stream)) = (cutter.next(), self.streams.first()) else {
            return Ok(None);
        };
        let plan = self.job.plan();
        let launcher =
            Launcher { kernels: &shared.kernels, tables: &shared.tables, stream, ctas: *ctas };
        let [source, destination] = layout_ends(plan, &self.grid, &self.ends, None);
        // SAFETY: the plan has been validated, the job keeps both ends alive until the stream has
        // come past, and its claims keep others off them.
        unsafe { launcher.copy(&self.grid, &part, source, destination) }?;
        let layers = layers_up_to(&self.grid, plan, &part);
        Ok(Some(Stepped { bytes: cutter.bytes(&part), stream: 0, layers }))
    }

    fn step_staged(
        &mut self,
        shared: &Shared,
        scratch: &Scratch,
    ) -> Result<Option<Stepped>, CudaError> {
        let Steps::Staged(staged) = &mut self.steps else { return Ok(None) };
        let (Some(copies), Some(kernels)) = (self.streams.first(), self.streams.get(1)) else {
            return Ok(None);
        };
        let Some(part) = staged.cutter.next() else { return Ok(None) };
        let plan = self.job.plan();
        // Nothing else goes on beside the first part to the host: more thread blocks shorten it.
        let is_first = std::mem::replace(&mut staged.is_first, false);
        let pack = shared.options.pack_ctas.get();
        let to_host = self.direction == Direction::ToHost;
        let ctas = if is_first && to_host { pack.saturating_mul(3) } else { pack };
        let launcher =
            Launcher { kernels: &shared.kernels, tables: &shared.tables, stream: kernels, ctas };
        let sorted = staged.sorted.as_ref();
        let [source, destination] = layout_ends(plan, &self.grid, &self.ends, sorted);
        let strides = staged.packing.strides(&part);
        let host = if to_host { 1 } else { 0 };
        let host_end = self.grid.end(if to_host { Side::Destination } else { Side::Source });
        let packed = KernelEnd::Packed { address: scratch.address(), strides, end: host_end };
        let host_blocks = match (sorted, to_host) {
            (Some([sources, _]), false) => sources,
            (Some([_, destinations]), true) => destinations,
            (None, false) => plan.source_blocks(),
            (None, true) => plan.destination_blocks(),
        };
        let Some(reach) = self.ends.get(host) else { return Ok(None) };
        let most = shared.options.request_bytes.get().max(1);
        let mut found = Ok(());
        staged.packing.stretches(&part, host_blocks, |stretch| {
            let layer = u64::from(stretch.layer);
            let region =
                u64::from(host_end.first_region) + layer * u64::from(host_end.regions_per_layer);
            let offset = host_end.offset
                + u64::from(stretch.block) * host_end.block_stride
                + layer * host_end.layer_stride
                + u64::from(stretch.outer) * host_end.outer_stride;
            let region = u32::try_from(region).unwrap_or(u32::MAX);
            let (mut at, mut left) = (scratch.address() + stretch.at, stretch.bytes);
            let Some(mut address) = reach.copy_address(region, offset) else {
                found = Err(CudaError::NotReached { device: shared.context.device().id });
                return;
            };
            while left > 0 {
                let bytes = reach.unsplit(address, left.min(most));
                let (from, to) = if to_host { (at, address) } else { (address, at) };
                staged.batch.push(from, to, bytes);
                (at, address, left) = (at + bytes, address + bytes, left - bytes);
            }
        });
        found?;
        let between = Event::new(&shared.context, Timing::Off)?;
        if to_host {
            // SAFETY: the part is of a validated plan whose ends the job keeps alive and to itself
            // until the streams have come past; the buffer holds it and is nobody else's.
            unsafe { launcher.copy(&self.grid, &part, source, packed) }?;
            between.record(kernels)?;
            copies.wait_for(&between)?;
            // SAFETY: as above; the stretches are those of the part.
            unsafe { staged.batch.submit(copies) }?;
        } else {
            // SAFETY: as above.
            unsafe { staged.batch.submit(copies) }?;
            between.record(copies)?;
            kernels.wait_for(&between)?;
            // SAFETY: as above.
            unsafe { launcher.copy(&self.grid, &part, packed, destination) }?;
        }
        let layers = layers_up_to(&self.grid, plan, &part);
        let bytes = staged.packing.bytes(&part);
        Ok(Some(Stepped { bytes, stream: if to_host { 0 } else { 1 }, layers }))
    }
}

/// A part that has been submitted.
struct Stepped {
    bytes: u64,
    /// Which of the streams comes to its end.
    stream: usize,
    /// How many layers of a layer-wise transfer have been submitted whole.
    layers: u32,
}

/// Of a transfer that is cut layer by layer: how many layers are whole with this part.
fn layers_up_to(grid: &CopyGrid, plan: &TransferPlan, part: &Part) -> u32 {
    let pairs = ByteCount::from_usize(plan.destination_blocks().len()).get();
    let is_last = u64::from(part.pairs.end) >= pairs;
    let whole = if is_last { part.layers.end } else { part.layers.start };
    if whole >= grid.layers { plan.layers().end - plan.layers().start } else { whole }
}

fn layout_ends<'a>(
    plan: &'a TransferPlan,
    grid: &'a CopyGrid,
    ends: &'a [Arc<Reach>; 2],
    sorted: Option<&'a [Vec<u32>; 2]>,
) -> [KernelEnd<'a>; 2] {
    let blocks: [&[u32]; 2] = match sorted {
        Some([sources, destinations]) => [sources, destinations],
        None => [plan.source_blocks(), plan.destination_blocks()],
    };
    [
        KernelEnd::Layout { reach: &ends[0], end: &grid.source, blocks: blocks[0] },
        KernelEnd::Layout { reach: &ends[1], end: &grid.destination, blocks: blocks[1] },
    ]
}

fn pairs_of(plan: &TransferPlan) -> u32 {
    u32::try_from(plan.destination_blocks().len()).unwrap_or(u32::MAX)
}

impl Steps {
    fn runs(together: bool) -> Self {
        Self::Runs { next: 0, offset: 0, batch: Batch::default(), together }
    }

    fn kernels(
        shared: &Shared,
        plan: &TransferPlan,
        grid: &CopyGrid,
        direction: Direction,
        layer_wise: bool,
    ) -> Self {
        let options = &shared.options;
        let (ctas, limit) = match direction {
            Direction::WithinDevice => (shared.relayout_ctas(), options.relayout_bytes),
            _ => (options.direct_ctas.get(), options.request_bytes),
        };
        let packing = Packing::unpacked(grid, layer_wise);
        let limit = if layer_wise { limit.get().min(LAYERS_TOGETHER) } else { limit.get() };
        // A layer of a block is copied whole, however long it is.
        let limit = limit.max(packing.of_layer());
        match Cutter::new(packing, pairs_of(plan), limit, Ramp::Flat) {
            Some(cutter) => Self::Kernels { cutter, ctas },
            None => Self::runs(false),
        }
    }
}

impl Staged {
    /// `None` if the transfer cannot be staged.
    fn of(
        shared: &Shared,
        plan: &TransferPlan,
        grid: &CopyGrid,
        direction: Direction,
        layer_wise: bool,
    ) -> Option<Self> {
        let (side, ramp) = match direction {
            Direction::ToHost => (Side::Destination, Ramp::Up),
            _ => (Side::Source, Ramp::Down),
        };
        let packing = packing_for(grid, side, layer_wise)?;
        let largest = shared.options.scratch_bytes.get();
        let largest =
            if layer_wise { largest.min(LAYERS_TOGETHER.max(packing.of_layer())) } else { largest };
        let cutter = Cutter::new(packing, pairs_of(plan), largest, ramp)?;
        // The plan has its destinations in order already.
        let is_sorted = side == Side::Destination || plan.source_blocks().is_sorted();
        let sorted = (!is_sorted).then(|| sort_by_source(plan));
        Some(Self { cutter, packing, batch: Batch::default(), sorted, is_first: true })
    }
}

/// How a transfer is packed for one of its ends, if it can be staged.
///
/// Of a block that is packed whole no layer arrives before the others, so layers that are to
/// arrive one by one are packed one by one.
pub(super) fn packing_for(grid: &CopyGrid, side: Side, layer_wise: bool) -> Option<Packing> {
    let packing = Packing::of(grid, grid.end(side))?;
    Some(if layer_wise { packing.by_layers(grid.end(side)) } else { packing })
}

fn sort_by_source(plan: &TransferPlan) -> [Vec<u32>; 2] {
    let pairs = plan.source_blocks().iter().zip(plan.destination_blocks());
    let mut pairs: Vec<(u32, u32)> = pairs.map(|(&source, &to)| (source, to)).collect();
    pairs.sort_unstable();
    pairs.into_iter().unzip::<_, _, Vec<_>, Vec<_>>().into()
}
