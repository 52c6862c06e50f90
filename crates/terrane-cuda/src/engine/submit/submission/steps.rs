//! The paths: how each submits the next chunk of a job.

use std::sync::Arc;

use terrane_core::ByteCount;
use terrane_core::convert::to_u64;
use terrane_transfer::calibration::Direction;
use terrane_transfer::{CopyFailure, CopyGrid, Side, TransferPlan};

use crate::engine::checksums::job_sums::ChunkOrder;
use crate::engine::complete::failed_job::engine_failure;
use crate::engine::geometry::chunker::{ChunkRamp, Chunker, bytes_of_launch};
use crate::engine::geometry::index;
use crate::engine::geometry::packing::{
    Chunk, Packing, PackingOrder, runs_are_blocks, staged_side,
};
use crate::engine::resources::block_lists::{BlockLists, list_bytes};
use crate::engine::resources::device_mapping::DeviceMapping;
use crate::engine::shared::Shared;
use crate::engine::submit::batch::Batch;
use crate::engine::submit::launch::{KernelEnd, Launcher};
use crate::engine::submit::submission::Submission;
use crate::error::CudaError;
use crate::kernels::{INLINE_BLOCKS, Kernels};
use crate::runtime::event::Event;
use crate::runtime::stream::Stream;

pub(crate) enum Steps {
    /// The driver's copies. The next one begins at this run, at this offset in the run.
    Runs {
        next: usize,
        offset: u64,
        batch: Batch,
        together: bool,
    },
    /// Kernels that copy from one end to the other.
    Kernels {
        chunker: Chunker,
        ctas: u32,
        /// Whether the lists of block ids have not been uploaded yet.
        lists: bool,
    },
    Staged(Staged),
}

pub(crate) struct Staged {
    chunker: Chunker,
    /// The blocks in the host's order, if the plan has another order: those of the source, and
    /// those of the destination.
    sorted: Option<[Vec<u32>; 2]>,
    /// The same as numbers for the grids, if they are not the ids.
    numbers: Option<[Vec<u32>; 2]>,
    is_first: bool,
    is_only: bool,
}

/// The maximum number of driver calls for one chunk, and of runs in one batch.
const MOST_CALLS: usize = 64;
const MOST_TOGETHER: usize = 4096;
/// The maximum size of layers that a layer-by-layer transfer copies together: an event costs as
/// much as 50 KiB.
const LAYERS_TOGETHER: u64 = 4 << 20;

/// The maximum size of a chunk of a layer-by-layer transfer whose layers have this size. Parts of a
/// layer would only add launches and events.
fn chunk_of_layers(layer: u64) -> u64 {
    LAYERS_TOGETHER.max(layer)
}

impl Submission {
    #[inline(never)]
    pub(crate) fn step_runs(
        &mut self,
        shared: &Shared,
    ) -> Result<Option<SubmittedCopies>, CopyFailure> {
        let Steps::Runs { next, offset, batch, together } = &mut self.steps else {
            return Ok(None);
        };
        let Some(stream) = self.streams.first() else { return Ok(None) };
        let plan = self.job.plan();
        let most = if *together { MOST_TOGETHER } else { MOST_CALLS };
        let mut limit = shared.options.request_bytes.get().max(1);
        if self.job.layers().is_some() {
            let layers = u64::from(plan.layers().end - plan.layers().start);
            limit = limit.min(chunk_of_layers(plan.bytes().get() / layers.max(1)));
        }
        let (mut bytes, mut calls) = (0, 0);
        let first = (*next, *offset);
        while let Some(run) = plan.runs().get(*next).filter(|_| bytes < limit && calls < most) {
            let left = run.bytes().get() - *offset;
            let places = [(Side::Source, &self.ends[0]), (Side::Destination, &self.ends[1])];
            let mut length = left.min(limit - bytes);
            let [source, destination] = places.map(|(side, mapping)| {
                let at = run.at(side);
                let address = mapping.copy_address(at.region, at.offset + *offset)?;
                length = mapping.unsplit(address, length);
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
            // SAFETY: the plan's runs lie within the regions of both ends. The job keeps them alive
            // until the copies have completed, and its claims exclude other users.
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
        let is_left = *next < plan.runs().len();
        let next_layer = is_left.then(|| plan.layer(*next) - plan.layers().start);
        let layers = next_layer.unwrap_or(plan.layers().end - plan.layers().start);
        Ok(Some(SubmittedCopies { bytes, stream: 0, layers }))
    }

    pub(crate) fn step_kernels(
        &mut self,
        shared: &Shared,
    ) -> Result<Option<SubmittedCopies>, CudaError> {
        if let Steps::Kernels { lists, .. } = &mut self.steps
            && std::mem::take(lists)
        {
            self.list_blocks(shared)?;
        }
        let Steps::Kernels { chunker, ctas, .. } = &mut self.steps else { return Ok(None) };
        let (Some(chunk), Some(stream)) = (chunker.next(), self.streams.first()) else {
            return Ok(None);
        };
        let plan = self.job.plan();
        let launcher =
            Launcher { kernels: kernels(shared)?, tables: &shared.tables, stream, ctas: *ctas };
        for grid in self.grids.iter() {
            let [source, destination] =
                layout_ends(plan, grid, &self.ends, None, self.lists.as_ref());
            // SAFETY: the plan has been validated. The job keeps both ends alive until the copies
            // have completed, and its claims exclude other users.
            unsafe { launcher.copy(grid, &chunk, source, destination) }?;
        }
        let layers = layers_up_to(&self.grids, plan, &chunk);
        Ok(Some(SubmittedCopies { bytes: chunker.bytes(&chunk), stream: 0, layers }))
    }

    /// Writes the block ids into the device's memory, because a launch does not carry them all.
    #[inline(never)]
    fn list_blocks(&mut self, shared: &Shared) -> Result<(), CudaError> {
        let plan = self.job.plan();
        let Some(stream) = self.streams.first() else { return Ok(()) };
        let blocks = Side::BOTH.map(|side| plan.grid_blocks(side));
        let lists = match self.list_memory.take() {
            Some(lists) => Ok(lists),
            None => shared.lists.take_or_allocate(list_bytes(blocks)),
        };
        let filled = lists.and_then(|mut lists| lists.fill(blocks, stream).map(|()| lists));
        match filled {
            Ok(lists) => self.lists = Some(lists),
            Err(error) if error.is_context_lost() => return Err(error),
            // The launches then carry the ids in their parameters, and there are more launches.
            Err(error) => tracing::debug!(%error, "no list of blocks"),
        }
        Ok(())
    }

    pub(crate) fn step_staged(
        &mut self,
        shared: &Shared,
    ) -> Result<Option<SubmittedCopies>, CudaError> {
        let Steps::Staged(staged) = &mut self.steps else { return Ok(None) };
        // A transfer of one chunk uses one stream.
        let Some(copies) = self.streams.first() else { return Ok(None) };
        let packing = self.streams.get(1).unwrap_or(copies);
        let Some((scratch, _)) = &mut self.scratch else { return Ok(None) };
        let (buffer, batch) = scratch.address_and_batch();
        // A failed chunk may have left copies in the list.
        batch.clear();
        let Some(chunk) = staged.chunker.next() else { return Ok(None) };
        let plan = self.job.plan();
        let to_host = self.direction == Direction::ToHost;
        // No other work runs beside the first chunk to the host, or beside the only chunk of a
        // transfer. More thread blocks shorten it, and one stream carries both of its halves.
        let is_first = std::mem::replace(&mut staged.is_first, false);
        let is_alone = staged.is_only || (is_first && to_host);
        let pack = shared.options.pack_ctas.get();
        let (packing, ctas) =
            if is_alone { (copies, pack.saturating_mul(3)) } else { (packing, pack) };
        let (kernels, tables) = (kernels(shared)?, &shared.tables);
        let launcher = Launcher { kernels, tables, stream: packing, ctas };
        let sorted = staged.numbers.as_ref().or(staged.sorted.as_ref());
        let host = if to_host { 1 } else { 0 };
        let host_side = if to_host { Side::Destination } else { Side::Source };
        let Some(host_end) = self.grids.first().map(|grid| grid.end(host_side)) else {
            return Ok(None);
        };
        let page = staged.chunker.packing.page;
        let begin = page.map_or(host_end.offset, |page| page.offset());
        let outer_stride = page.map_or(host_end.outer_stride, |page| page.part_stride());
        let host_blocks = match (sorted, to_host) {
            (Some([sources, _]), false) => sources,
            (Some([_, destinations]), true) => destinations,
            (None, _) => plan.grid_blocks(host_side),
        };
        let Some(mapping) = self.ends.get(host) else { return Ok(None) };
        let most = shared.options.request_bytes.get().max(1);
        let begin_of = |part: (u32, u32)| {
            let (layer, outer) = (u64::from(part.0), u64::from(part.1));
            let region =
                u64::from(host_end.first_region) + layer * u64::from(host_end.regions_per_layer);
            let offset = begin + layer * host_end.layer_stride + outer * outer_stride;
            mapping.copy_address(u32::try_from(region).unwrap_or(u32::MAX), offset)
        };
        // The part of the last stretch, and the address of its block 0.
        let mut of_part = ((0, 0), begin_of((0, 0)));
        let mut found = Ok(());
        staged.chunker.packing.stretches(&chunk, host_blocks, |stretch| {
            let part = (stretch.layer, stretch.outer);
            if of_part.0 != part {
                of_part = (part, begin_of(part));
            }
            let (mut at, mut left) = (buffer + stretch.at, stretch.bytes);
            let block = u64::from(stretch.block) * host_end.block_stride;
            let Some(mut address) = of_part.1.and_then(|begin| begin.checked_add(block)) else {
                found = Err(CudaError::NotReached { device: shared.context.device().id });
                return;
            };
            while left > 0 {
                let bytes = mapping.unsplit(address, left.min(most));
                let (from, to) = if to_host { (at, address) } else { (address, at) };
                batch.push(from, to, bytes);
                (at, address, left) = (at + bytes, address + bytes, left - bytes);
            }
        });
        found?;
        // Later work on the other stream runs after this.
        let hand_over = |from: &Stream, to: &Stream| {
            if is_alone {
                return Ok(());
            }
            to.wait_for(&Event::queried_after(from)?)
        };
        let launch = || {
            for grid in self.grids.iter() {
                let [source, destination] = layout_ends(plan, grid, &self.ends, sorted, None);
                let (end, mine) =
                    (grid.end(host_side), staged.chunker.packing.of_grid(&chunk, grid));
                let strides = staged.chunker.packing.strides(&chunk, end);
                let packed = KernelEnd::Packed { address: buffer, strides, end };
                let (source, destination) =
                    if to_host { (source, packed) } else { (packed, destination) };
                // SAFETY: the chunk belongs to a validated plan. The job keeps the plan's ends alive
                // and exclusive until the streams have passed it. The buffer has room for it and
                // has no other user.
                unsafe { launcher.copy(grid, &mine, source, destination) }?;
            }
            Ok::<_, CudaError>(())
        };
        if to_host {
            launch()?;
            hand_over(packing, copies)?;
            // SAFETY: as above; the stretches are those of the chunk.
            unsafe { batch.submit(copies) }?;
        } else {
            // SAFETY: as above.
            unsafe { batch.submit(copies) }?;
            hand_over(copies, packing)?;
            launch()?;
        }
        let whole = self.grids.first().map(|grid| staged.chunker.packing.of_grid(&chunk, grid));
        let layers = whole.map_or(0, |chunk| layers_up_to(&self.grids, plan, &chunk));
        let bytes = staged.chunker.packing.bytes(&chunk);
        let stream = if to_host || is_alone { 0 } else { 1 };
        Ok(Some(SubmittedCopies { bytes, stream, layers }))
    }
}

/// The kernels. A quote for a path with kernels always has them.
fn kernels(shared: &Shared) -> Result<&Kernels, CudaError> {
    let device = shared.context.device().id;
    shared.kernels.as_ref().ok_or(CudaError::NotReached { device })
}

/// The copies of a chunk that have been submitted, before an event is recorded behind them.
pub(crate) struct SubmittedCopies {
    pub(crate) bytes: u64,
    /// The stream that carries the chunk's last work.
    pub(crate) stream: usize,
    /// The number of complete submitted layers of a layer-by-layer transfer.
    pub(crate) layers: u32,
}

/// The number of layers that are complete with this chunk.
fn layers_up_to(grids: &[CopyGrid], plan: &TransferPlan, chunk: &Chunk) -> u32 {
    // All grids have the layers of the transfer.
    let layers = grids.first().map_or(1, |grid| grid.layers);
    let pairs = to_u64(plan.destination_blocks().len());
    let is_last = u64::from(chunk.pairs.end) >= pairs;
    let whole = if is_last { chunk.layers.end } else { chunk.layers.start };
    if whole >= layers { plan.layers().end - plan.layers().start } else { whole }
}

fn layout_ends<'a>(
    plan: &'a TransferPlan,
    grid: &'a CopyGrid,
    ends: &'a [Arc<DeviceMapping>; 2],
    sorted: Option<&'a [Vec<u32>; 2]>,
    lists: Option<&BlockLists>,
) -> [KernelEnd<'a>; 2] {
    let blocks: [&[u32]; 2] = match sorted {
        Some([sources, destinations]) => [sources, destinations],
        None => Side::BOTH.map(|side| plan.grid_blocks(side)),
    };
    let list = lists.map_or([0, 0], |lists| lists.addresses);
    let ([mapping, to], [blocks, blocks_to], [list, list_to]) = (ends, blocks, list);
    [
        KernelEnd::Layout { mapping, end: &grid.source, blocks, list },
        KernelEnd::Layout { mapping: to, end: &grid.destination, blocks: blocks_to, list: list_to },
    ]
}

fn pairs_of(plan: &TransferPlan) -> u32 {
    u32::try_from(plan.destination_blocks().len()).unwrap_or(u32::MAX)
}

impl Steps {
    /// How the chunks complete the pairs of a transfer with these grids.
    pub(crate) fn order(&self, grids: &[CopyGrid]) -> ChunkOrder {
        match self {
            Self::Runs { .. } => ChunkOrder { is_in_order: runs_are_blocks(grids), sorted: None },
            // The copies of all chunks are on one stream, so sums on it would delay the next copy.
            Self::Kernels { .. } => ChunkOrder { is_in_order: false, sorted: None },
            Self::Staged(staged) => ChunkOrder {
                is_in_order: staged.chunker.packing.order == PackingOrder::Blocks,
                sorted: staged.sorted.as_ref().map(|[_, destinations]| destinations.clone()),
            },
        }
    }

    pub(crate) fn runs(together: bool) -> Self {
        Self::Runs { next: 0, offset: 0, batch: Batch::default(), together }
    }

    pub(crate) fn kernels(
        shared: &Shared,
        plan: &TransferPlan,
        grids: &[CopyGrid],
        direction: Direction,
        layer_by_layer: bool,
    ) -> Self {
        if grids.is_empty() {
            return Self::runs(false);
        }
        let options = &shared.options;
        let (ctas, limit) = match direction {
            Direction::WithinDevice => (shared.relayout_ctas(), options.relayout_bytes),
            Direction::ToPeer | Direction::FromPeer => {
                (options.peer_ctas.get(), options.relayout_bytes)
            }
            _ => (options.direct_ctas.get(), options.request_bytes),
        };
        let packing = Packing::unpacked(grids, layer_by_layer);
        let layer = packing.of_layer() * u64::from(pairs_of(plan));
        let limit =
            if layer_by_layer { limit.get().min(chunk_of_layers(layer)) } else { limit.get() };
        let limit = bytes_of_launch(limit, grids.iter().map(|grid| grid.bytes.get()));
        // A layer of a block is copied whole, whatever its length.
        let limit = limit.max(packing.of_layer());
        match Chunker::new(packing, pairs_of(plan), limit, ChunkRamp::Flat) {
            Some(chunker) => {
                // A launch carries this many ids of each end.
                let most = INLINE_BLOCKS / 2;
                let lists = if chunker.fits_one_chunk() {
                    index(chunker.pairs()) > most
                } else {
                    chunker.clone().any(|chunk| index(chunk.pairs.end - chunk.pairs.start) > most)
                };
                Self::Kernels { chunker, ctas, lists }
            }
            None => Self::runs(false),
        }
    }
}

impl Staged {
    pub(crate) fn fits_one_chunk(&self) -> bool {
        self.chunker.fits_one_chunk()
    }

    pub(crate) fn is_submitted(&self) -> bool {
        self.chunker.is_done()
    }

    pub(crate) fn is_only(&self) -> bool {
        self.is_only
    }

    pub(crate) fn in_one_chunk(&mut self) {
        (self.chunker, self.is_only) = (self.chunker.flat(), true);
    }

    /// `None` if the transfer cannot be staged.
    pub(crate) fn of(
        shared: &Shared,
        plan: &TransferPlan,
        grids: &[CopyGrid],
        direction: Direction,
        packing: Option<Packing>,
        layer_by_layer: bool,
    ) -> Option<Self> {
        let (packing, side) = (packing?, staged_side(direction));
        let ramp = if side == Side::Destination { ChunkRamp::Up } else { ChunkRamp::Down };
        let cells = grids.iter().map(|grid| grid.bytes.get());
        let largest = bytes_of_launch(shared.options.scratch_bytes.get(), cells);
        let largest = if layer_by_layer {
            largest.min(chunk_of_layers(packing.of_layer() * u64::from(pairs_of(plan))))
        } else {
            largest
        };
        let chunker = Chunker::new(packing, pairs_of(plan), largest, ramp)?;
        // The plan already has its destinations in order.
        let is_sorted = side == Side::Destination || plan.source_blocks().is_sorted();
        let sorted = (!is_sorted).then(|| plan.pairs_by_source());
        let numbers = sorted.as_ref().filter(|_| plan.has_chunked_blocks()).map(|sorted| {
            let [sources, destinations] = sorted.clone();
            let of_end = |side, blocks| plan.numbered(side, blocks);
            [of_end(Side::Source, sources), of_end(Side::Destination, destinations)]
        });
        Some(Self { chunker, sorted, numbers, is_first: true, is_only: false })
    }
}
