//! The checksums of one job, while kernels compute them.

use std::sync::Arc;

use terrane_core::checksum::Crc64Shift;
use terrane_core::{ByteCount, Memory};
use terrane_transfer::calibration::Direction;
use terrane_transfer::{CopyJob, Side, TransferPlan};

use crate::driver::code::DriverCode;
use crate::engine::checksums::limits::{LargestLaunch, SumLimits, all_bytes};
use crate::engine::checksums::shape::SumShape;
use crate::engine::checksums::tables::SumTables;
use crate::engine::geometry::index;
use crate::engine::resources::block_lists::{BlockLists, ListPool};
use crate::engine::resources::device_mapping::DeviceMapping;
use crate::engine::shared::Shared;
use crate::error::CudaError;
use crate::kernels::Kernels;
use crate::runtime::event::Event;
use crate::runtime::stream::Stream;

/// The checksums of a job. Kernels compute them: from the source while it is copied, or from each
/// chunk of the destination once that has arrived.
#[derive(Debug)]
pub(crate) struct JobSums {
    shape: SumShape,
    /// The end that is in the device's own memory.
    side: Side,
    limits: SumLimits,
    /// The launch for which the blocks are divided into segments.
    launch: LargestLaunch,
    pairs: u32,
    /// The destination blocks in the order of the chunks, if the plan has another order.
    sorted: Option<Vec<u32>>,
    /// Whether chunks complete pairs one after the other, in the order above.
    is_in_order: bool,
    /// Whether the job's stream waits for its order.
    pub(crate) waits: bool,
    /// Whether its stream has been chosen.
    pub(crate) has_stream: bool,
    /// The memory of the tables.
    memory: Option<BlockLists>,
    tables: Option<SumTables>,
    /// The pairs whose sums are submitted.
    summed: u32,
    /// The event behind the copy of the sums to the host.
    fetched: Option<Event>,
}

/// How the chunks of a job complete its pairs.
pub(crate) struct ChunkOrder {
    /// Whether they complete pairs one after the other.
    pub(crate) is_in_order: bool,
    /// Their destination blocks, if the plan has another order.
    pub(crate) sorted: Option<Vec<u32>>,
}

/// The side whose bytes are summed: the one in the device's own memory.
pub(crate) fn summed_side(direction: Direction) -> Side {
    match direction {
        Direction::ToDevice | Direction::FromPeer => Side::Destination,
        Direction::ToHost | Direction::WithinDevice | Direction::ToPeer => Side::Source,
    }
}

/// The order of a block's bytes at one end; `None` if kernels cannot compute its checksum.
pub(crate) fn shape_of(plan: &TransferPlan, side: Side) -> Option<SumShape> {
    let (layers, tokens) = (plan.layers(), plan.tokens(side).unwrap_or(0..u32::MAX));
    let first = match side {
        Side::Source => layers.start,
        Side::Destination => plan.destination_first_layer(),
    };
    // A chunk of a relay may have some layers of its blocks.
    let layers = first..first + (layers.end - layers.start);
    SumShape::of(plan.end(side).layout().geometry(), layers, &tokens)
}

impl JobSums {
    /// The checksums that a job requests; `None` if it requests none.
    pub(crate) fn of(
        shared: &Shared,
        job: &CopyJob,
        direction: Direction,
        order: impl FnOnce() -> ChunkOrder,
    ) -> Option<Box<Self>> {
        if job.checksums() == 0 {
            return None;
        }
        let side = summed_side(direction);
        let shape = shape_of(job.plan(), side)?;
        let ChunkOrder { is_in_order, sorted } = order();
        let limits = SumLimits::of(shared, direction);
        let pairs = u32::try_from(job.checksums()).ok()?;
        let all = all_bytes(shape.block_bytes, index(pairs));
        let is_source = side == Side::Source;
        let launch = limits.largest_launch(all, is_in_order && !is_source, is_source);
        Some(Box::new(Self {
            shape,
            side,
            limits,
            launch,
            pairs,
            sorted,
            is_in_order,
            waits: false,
            has_stream: false,
            memory: None,
            tables: None,
            summed: 0,
            fetched: None,
        }))
    }

    pub(crate) fn limits(&self) -> SumLimits {
        self.limits
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.tables.is_some()
    }

    /// Takes memory for the tables, if some is unused. Returns whether the job has it.
    pub(crate) fn has_room(&mut self, lists: &Arc<ListPool>) -> bool {
        if self.memory.is_none() {
            let bytes = SumTables::bytes(&self.shape, index(self.pairs), self.launch);
            self.memory = lists.take(bytes);
        }
        self.memory.is_some()
    }

    /// Copies the tables to the device.
    ///
    /// # Errors
    ///
    /// The driver's, [`CudaError::NoMemoryForChecksums`].
    pub(crate) fn begin(
        &mut self,
        shared: &Shared,
        plan: &TransferPlan,
        mapping: &DeviceMapping,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let missing = || CudaError::NotReached { device: stream.context().device().id };
        let blocks = match &self.sorted {
            Some(sorted) => sorted,
            None => plan.blocks(self.side),
        };
        let tables = SumTables::of(&self.shape, mapping, blocks, self.launch, &shared.sum_factors)
            .ok_or_else(missing)?;
        if !self.has_room(&shared.lists) {
            let bytes = SumTables::bytes(&self.shape, index(self.pairs), self.launch);
            let blocks = self.pairs;
            let tables_memory =
                shared.lists.take_or_allocate(bytes).map_err(|error| match error.code() {
                    Some(DriverCode::OUT_OF_MEMORY) => {
                        CudaError::NoMemoryForChecksums { blocks, bytes, source: Box::new(error) }
                    }
                    _ => error,
                });
            self.memory = Some(tables_memory?);
        }
        let memory = self.memory.as_ref().and_then(BlockLists::memory);
        let (host, device) = memory.ok_or_else(missing)?;
        let (from, to) = (host.location(), device.location());
        let numbers = from.as_host().ok_or_else(missing)?.as_ptr().cast::<u64>();
        let table_numbers = &*tables.numbers;
        let bytes = ByteCount::from_usize(size_of_val(table_numbers));
        // SAFETY: the memory has room for the numbers, is aligned to pages, and belongs to this job
        // alone. An earlier copy of the same numbers reads the same bytes.
        unsafe { numbers.copy_from_nonoverlapping(table_numbers.as_ptr(), table_numbers.len()) };
        // SAFETY: both live until the job has ended, which is after this copy. Only work of the same
        // stream uses them. If the job begins again on another stream, that waits for this one.
        unsafe { stream.copy(from, to, bytes) }?;
        (self.tables, self.summed, self.fetched) = (Some(tables), 0, None);
        Ok(())
    }

    /// The number of pairs that are complete once `copied` of `all` bytes have been copied.
    pub(crate) fn complete(&self, copied: u64, all: u64) -> u32 {
        if copied >= all {
            return self.pairs;
        }
        let of_pair = (all / u64::from(self.pairs).max(1)).max(1);
        let complete = if self.is_in_order { copied / of_pair } else { 0 };
        u32::try_from(complete).unwrap_or(u32::MAX).min(self.pairs)
    }

    /// Whether pairs before this one are not summed yet.
    pub(crate) fn is_behind(&self, complete: u32) -> bool {
        self.summed < complete
    }

    /// Submits the sums of all pairs before `end` that have not been submitted, by at most `ctas`
    /// thread blocks at a time.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// The job keeps the blocks alive and unchanged until this work has completed. Their bytes are
    /// complete when it begins.
    pub(crate) unsafe fn sum(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        end: u32,
        ctas: u32,
    ) -> Result<(), CudaError> {
        let missing = || CudaError::NotReached { device: stream.context().device().id };
        let memory = self.memory.as_ref().and_then(BlockLists::memory);
        let (Some(tables), Some((_, device))) = (&self.tables, memory) else {
            return Err(missing());
        };
        while self.summed < end {
            let max_pairs = tables.most_pairs().min(self.limits.pairs(self.shape.block_bytes));
            let some = (end - self.summed).min(max_pairs);
            let pairs = self.summed..self.summed + some;
            let launch = tables.launch(&self.shape, device.address().get(), pairs);
            let ctas = self.limits.ctas(ctas, some.saturating_mul(tables.segments()));
            // SAFETY: the tables are in the job's memory, before this work of the stream. The
            // places are those of the plan's blocks, whose bytes the caller guarantees.
            unsafe { kernels.sum_blocks(stream, &launch, tables.width, ctas) }?;
            self.summed += some;
        }
        Ok(())
    }

    /// Copies the sums to the host, and records an event behind that.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub(crate) fn fetch(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let missing = || CudaError::NotReached { device: stream.context().device().id };
        let memory = self.memory.as_ref().and_then(BlockLists::memory);
        let (Some(tables), Some((host, device))) = (&self.tables, memory) else {
            return Err(missing());
        };
        let behind = ByteCount::from_usize(size_of_val(&*tables.numbers));
        let to = host.location().checked_add(behind).ok_or_else(missing)?;
        // SAFETY: the memory has as many bytes behind the tables, and lives until the job has ended.
        unsafe { stream.copy(device.location(), to, tables.sum_bytes()) }?;
        self.fetched = Some(Event::queried_after(stream)?);
        Ok(())
    }

    /// The event after which the host can read the sums, once they have been fetched.
    pub(crate) fn fetched(&self) -> Option<&Event> {
        self.fetched.as_ref()
    }

    /// Records that all chunks are copied again, in the order of the plan or in none.
    pub(crate) fn restart(&mut self) {
        self.is_in_order = false;
        if self.side == Side::Destination {
            (self.tables, self.fetched) = (None, None);
        }
    }

    /// Sets the checksums of a job whose work has ended. Without fetched sums it sets none.
    pub(crate) fn set(&self, job: &CopyJob) {
        let memory = self.memory.as_ref().and_then(BlockLists::memory);
        let (Some(tables), Some((host, _)), Some(_)) = (&self.tables, memory, &self.fetched) else {
            return;
        };
        let Some(numbers) = host.location().as_host() else { return };
        let numbers = numbers.as_ptr().cast::<u64>();
        let of_length = !Crc64Shift::of(self.shape.block_bytes).apply(u64::MAX);
        let destinations = job.plan().destination_blocks();
        for pair in 0..index(self.pairs) {
            // SAFETY: the memory has one number for each pair behind the tables.
            let place = unsafe { numbers.add(tables.numbers.len() + pair) };
            // SAFETY: the device has written it, and nothing writes it now.
            let sum = unsafe { place.read() };
            let sorted = self.sorted.as_ref().and_then(|sorted| sorted.get(pair));
            let number = match sorted {
                Some(block) => destinations.binary_search(block).unwrap_or(usize::MAX),
                None => pair,
            };
            job.set_checksum(number, sum ^ of_length);
        }
    }
}
