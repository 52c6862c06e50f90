//! Reads the blocks of a store, and compares them with their checksums.

use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::convert::to_usize;
use terrane_core::{ByteCount, HostAddress};
use terrane_storage::IoBuffer;

use super::{ListedBlock, ScrubReport, UnreadableBlock, sorted};
use crate::disk::Inspected;
use crate::error::StoreError;
use crate::slab::{
    JobId, Priority, SlabBuffers, SlabDirection, SlabDone, SlabFailure, SlabOptions, SlabRequest,
    SlabSink, Slabs,
};
use crate::store::job::result::{BlockResult, not_read};

/// Sends the result of each read.
struct ReadSink {
    /// The memory that the reads fill. It is freed before the receiver learns that all reads have ended.
    _buffers: Arc<Vec<Box<[u8]>>>,
    results: Sender<(usize, Result<SlabDone, SlabFailure>)>,
}

impl SlabSink for ReadSink {
    fn block_ended(&self, index: usize, result: Result<SlabDone, SlabFailure>) {
        // Without a receiver nothing waits for the result.
        let _ = self.results.send((index, result));
    }
}

/// The most blocks that are read at once.
const BLOCKS_AT_ONCE: usize = 16;

/// The most bytes that are read at once, unless one block has more.
const BYTES_AT_ONCE: u64 = 64 << 20;

/// The number of the first blocks that are read at once.
fn count_at_once(blocks: &[ListedBlock]) -> usize {
    let mut bytes = 0_u64;
    let fits = |block: &&ListedBlock| {
        bytes = bytes.saturating_add(block.length);
        bytes <= BYTES_AT_ONCE
    };
    blocks.iter().take(BLOCKS_AT_ONCE).take_while(fits).count().max(1)
}

/// Reads all blocks that were found, at most `rate` bytes a second on average. `None` and 0 set no
/// limit.
pub(super) fn read_all(
    directories: &[PathBuf],
    name: &str,
    found: Inspected,
    rate: Option<ByteCount>,
) -> Result<ScrubReport, StoreError> {
    let begun = Instant::now();
    let folders: Vec<PathBuf> = directories.iter().map(|directory| directory.join(name)).collect();
    found.check_directories(directories)?;
    let slot_alignment = found.placement.alignment();
    let options = SlabOptions { slot_alignment, read_only: true, ..SlabOptions::default() };
    let slabs = Slabs::open(&folders, &found.groups, &options)?;
    let blocks = sorted(found.live);
    let mut report = ScrubReport { as_of: found.as_of, ..ScrubReport::default() };
    let mut rest = blocks.as_slice();
    while !rest.is_empty() {
        let (part, others) = rest.split_at(count_at_once(rest));
        rest = others;
        for (block, result) in part.iter().zip(read_blocks(&slabs, part)) {
            report.blocks += 1;
            report.bytes = ByteCount::new(report.bytes.get().saturating_add(block.length));
            let block = || block.clone();
            match result {
                Ok(_) => {}
                Err(SlabFailure::Corrupt { .. }) => report.damaged.push(block()),
                Err(failure) => {
                    let error = error_of(failure);
                    report.unreadable.push(UnreadableBlock { block: block(), error });
                }
            }
        }
        if let Some(rate) = rate.filter(|rate| !rate.is_zero()) {
            let nanoseconds = u128::from(report.bytes.get()) * 1_000_000_000;
            let due = nanoseconds / u128::from(rate.get());
            let due = Duration::from_nanos(u64::try_from(due).unwrap_or(u64::MAX));
            thread::sleep(due.saturating_sub(begun.elapsed()));
        }
    }
    report.took = begun.elapsed();
    Ok(report)
}

/// Reads blocks, and returns the result of each.
fn read_blocks(slabs: &Slabs, blocks: &[ListedBlock]) -> Vec<Result<SlabDone, SlabFailure>> {
    let zeros = |block: &ListedBlock| vec![0_u8; to_usize(block.length)].into_boxed_slice();
    let mut memory: Vec<Box<[u8]>> = blocks.iter().map(zeros).collect();
    let buffer = |bytes: &mut Box<[u8]>| {
        let length = ByteCount::from_usize(bytes.len());
        let address = HostAddress::new(NonNull::from(&mut bytes[..]).cast::<u8>());
        SlabBuffers::from_elem(IoBuffer { address, length }, 1)
    };
    let buffers: Vec<SlabBuffers> = memory.iter_mut().map(buffer).collect();
    let memory = Arc::new(memory);
    let (sender, ended) = channel();
    let sink = Arc::new(ReadSink { _buffers: memory, results: sender });
    let request = |(index, (block, buffers)): (usize, (&ListedBlock, SlabBuffers))| SlabRequest {
        memory: None,
        job: JobId::new(0),
        index,
        group: block.group,
        slot: block.slot,
        buffers,
        direction: SlabDirection::Read { checksum: block.checksum },
        deadline: None,
        priority: Priority::Normal,
        sink: Arc::clone(&sink) as Arc<dyn SlabSink>,
    };
    let requests: Vec<SlabRequest> = blocks.iter().zip(buffers).enumerate().map(request).collect();
    drop(sink);
    // SAFETY: the sink owns the memory, and each request has the sink until it has ended. Nothing else
    // uses the memory.
    #[expect(unsafe_code, reason = "the memory is named by addresses")]
    unsafe {
        slabs.submit(requests);
    }
    // A request without a result was not read.
    let mut results = vec![Err(SlabFailure::Closed); blocks.len()];
    // The loop ends when the last request has dropped its sink.
    while let Ok((index, result)) = ended.recv() {
        if let Some(slot) = results.get_mut(index) {
            *slot = result;
        }
    }
    results
}

/// The error of a read that failed.
fn error_of(failure: SlabFailure) -> Arc<StoreError> {
    match not_read(failure) {
        BlockResult::Failed(error) => error,
        // The reads have no deadline, and none is cancelled.
        _ => Arc::new(StoreError::Closed),
    }
}
