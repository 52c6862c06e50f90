//! The checksums of one job, while kernels compute them.

use std::sync::Arc;
use std::time::Duration;

use terrane_core::checksum::Crc64Shift;
use terrane_core::{ByteCount, Memory};
use terrane_transfer::calibration::Direction;
use terrane_transfer::{CopyJob, Side, TransferPlan};

use crate::engine::checksums::shape::SumShape;
use crate::engine::checksums::tables::SumTables;
use crate::engine::geometry::index;
use crate::engine::resources::block_lists::{BlockLists, ListPool};
use crate::engine::resources::device_mapping::DeviceMapping;
use crate::engine::shared::Shared;
use crate::error::CudaError;
use crate::kernels::{BLOCK_WARPS, Kernels};
use crate::runtime::event::Event;
use crate::runtime::stream::Stream;

/// The checksums of a job. Kernels on a stream of their own compute them: from the source while it
/// is copied, or from each chunk of the destination once that has arrived.
#[derive(Debug)]
pub(crate) struct JobSums {
    shape: SumShape,
    /// The end in the device's own memory.
    side: Side,
    /// The number of warps that the blocks are cut for.
    warps: u32,
    pairs: u32,
    /// The destination blocks in the order of the chunks, if the plan has another one.
    sorted: Option<Vec<u32>>,
    /// Whether chunks complete pairs one after the other, in the order above.
    is_in_order: bool,
    /// The event behind the job's order, if the job's first stream waits for that.
    pub(crate) order: Option<Event>,
    /// Whether its stream has been chosen.
    pub(crate) has_stream: bool,
    /// The memory of the tables.
    room: Option<BlockLists>,
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
    /// The sums that a job wants; `None` if it wants none.
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
        Some(Box::new(Self {
            shape,
            side,
            warps: shared.sum_ctas().saturating_mul(BLOCK_WARPS),
            pairs: u32::try_from(job.checksums()).ok()?,
            sorted,
            is_in_order,
            order: None,
            has_stream: false,
            room: None,
            tables: None,
            summed: 0,
            fetched: None,
        }))
    }

    pub(crate) fn side(&self) -> Side {
        self.side
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.tables.is_some()
    }

    /// Takes memory for the tables, if some is unused. Returns whether the job has it.
    pub(crate) fn has_room(&mut self, lists: &Arc<ListPool>) -> bool {
        if self.room.is_none() {
            let bytes = SumTables::bytes(&self.shape, index(self.pairs), self.warps);
            self.room = lists.take(bytes);
        }
        self.room.is_some()
    }

    /// Copies the tables to the device.
    ///
    /// # Errors
    ///
    /// The driver's, also if there is no memory.
    pub(crate) fn begin(
        &mut self,
        lists: &Arc<ListPool>,
        plan: &TransferPlan,
        mapping: &DeviceMapping,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let missing = || CudaError::NotReached { device: stream.context().device().id };
        let blocks = match &self.sorted {
            Some(sorted) => sorted,
            None => plan.blocks(self.side),
        };
        let tables = SumTables::of(&self.shape, mapping, blocks, self.warps).ok_or_else(missing)?;
        if !self.has_room(lists) {
            let bytes = SumTables::bytes(&self.shape, index(self.pairs), self.warps);
            self.room = Some(lists.take_or_make(bytes)?);
        }
        let memory = self.room.as_ref().and_then(BlockLists::memory);
        let (host, device) = memory.ok_or_else(missing)?;
        let (from, to) = (host.location(), device.location());
        let numbers = from.as_host().ok_or_else(missing)?.as_ptr().cast::<u64>();
        let given = tables.numbers();
        let bytes = ByteCount::from_usize(size_of_val(given));
        // SAFETY: the memory has room for the numbers, is aligned to pages, and belongs to this job
        // alone. An earlier copy of the same numbers reads the same bytes.
        unsafe { numbers.copy_from_nonoverlapping(given.as_ptr(), given.len()) };
        // SAFETY: both live until the job has ended, which is after this copy, and only work of the
        // same stream uses them.
        unsafe { stream.copy(from, to, bytes) }?;
        (self.tables, self.summed, self.fetched) = (Some(tables), 0, None);
        Ok(())
    }

    /// The number of pairs that are complete once this many bytes of all have been copied.
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

    /// Submits the sums of all pairs before `end` that have not been submitted.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// The job keeps the blocks alive and unchanged until the stream has passed this. Their bytes
    /// are complete when the stream reaches it.
    pub(crate) unsafe fn sum(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        end: u32,
        ctas: u32,
    ) -> Result<(), CudaError> {
        let missing = || CudaError::NotReached { device: stream.context().device().id };
        let memory = self.room.as_ref().and_then(BlockLists::memory);
        let (Some(tables), Some((_, device))) = (&self.tables, memory) else {
            return Err(missing());
        };
        while self.summed < end {
            let some = (end - self.summed).min(tables.most_pairs());
            let pairs = self.summed..self.summed + some;
            let launch = tables.launch(&self.shape, device.address().get(), pairs);
            // SAFETY: the tables are in the job's memory, before this work of the stream. The places
            // are those of the plan's blocks, whose bytes the caller guarantees.
            unsafe { kernels.sum_blocks(stream, &launch, tables.width(), ctas) }?;
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
        let memory = self.room.as_ref().and_then(BlockLists::memory);
        let (Some(tables), Some((host, device))) = (&self.tables, memory) else {
            return Err(missing());
        };
        let behind = ByteCount::from_usize(size_of_val(tables.numbers()));
        let to = host.location().checked_add(behind).ok_or_else(missing)?;
        // SAFETY: the room has as many bytes behind the tables, and lives until the job has ended.
        unsafe { stream.copy(device.location(), to, tables.sum_bytes()) }?;
        self.fetched = Some(Event::asked_behind(stream)?);
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
        let memory = self.room.as_ref().and_then(BlockLists::memory);
        let (Some(tables), Some((host, _)), Some(_)) = (&self.tables, memory, &self.fetched) else {
            return;
        };
        let Some(numbers) = host.location().as_host() else { return };
        let numbers = numbers.as_ptr().cast::<u64>();
        let of_length = !Crc64Shift::of(self.shape.block_bytes()).apply(u64::MAX);
        let destinations = job.plan().destination_blocks();
        for pair in 0..index(self.pairs) {
            // SAFETY: the memory has one number for each pair behind the tables.
            let place = unsafe { numbers.add(tables.numbers().len() + pair) };
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

/// The extra time that a quote adds for checksums of this many bytes.
pub(crate) fn predicted(direction: Direction, bytes: u64) -> Duration {
    /// The tables, two kernels and the sums on their way.
    const FIXED: Duration = Duration::from_micros(15);
    /// The bytes that kernels on the whole device sum in a microsecond.
    const PER_MICRO: u64 = 800_000;
    /// The last bytes of a transfer to the device are summed when no others are on their way.
    const LAST: u64 = 32 << 20;
    let alone = match direction {
        // The wire is slower than the kernels beside it.
        Direction::ToHost => 0,
        Direction::ToDevice => bytes.min(LAST),
        Direction::WithinDevice | Direction::ToPeer | Direction::FromPeer => bytes,
    };
    FIXED + Duration::from_micros(alone / PER_MICRO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_to_the_host_hides_its_checksums() {
        let one = predicted(Direction::ToHost, 1 << 20);
        assert_eq!(predicted(Direction::ToHost, 1 << 30), one);
        assert!(predicted(Direction::WithinDevice, 1 << 30) > one);
    }
}
