//! The machine's best rates, measured beside the hops.

use std::path::Path;
use std::slice;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use terrane::core::{ByteCount, Memory, RegionRequest};
use terrane::storage::{
    DiskFile, DiskOptions, IoBuffer, IoFile, IoQueue, IoQueueOptions, IoRequest, StorageError,
    SystemAllocator, SystemMemory,
};

use crate::device::Wire;
use crate::failure::Failure;

/// Two contiguous buffers and a file, each as large as what a hop moves.
pub struct Limits {
    // Drops first, and waits for what is still in flight after an error.
    queue: IoQueue,
    from: SystemMemory,
    to: SystemMemory,
    file: DiskFile,
    request: ByteCount,
    threads: usize,
    wire: Option<Wire>,
}

/// Which way the limit of a hop lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Memory,
    DiskWrite,
    DiskRead,
    ToHost,
    ToDevice,
}

/// How the engines that the limits stand beside are set up.
pub struct Setup<'a> {
    pub threads: usize,
    pub queue: &'a IoQueueOptions,
    pub request: ByteCount,
    pub wire: Option<Wire>,
}

impl Limits {
    pub fn new(
        bytes: ByteCount,
        memory: &SystemAllocator,
        directory: &Path,
        setup: Setup<'_>,
    ) -> Result<Self, Failure> {
        let make = || {
            let file = DiskFile::scratch(directory, bytes, &DiskOptions::default())?;
            let buffer =
                || memory.allocate_memory(&RegionRequest::new(file.length()).labelled("limit"));
            let (from, to) = (buffer()?, buffer()?);
            let queue = IoQueue::new(setup.queue)?;
            let (request, threads) = (setup.request, setup.threads);
            Ok(Self { queue, from, to, file, request, threads, wire: None })
        };
        let mut limits = make().map_err(Failure::Limit)?;
        // The first pass over blocks that were only reserved does not count.
        limits.measure(Limit::DiskWrite)?;
        limits.wire = setup.wire;
        Ok(limits)
    }

    /// One pass over all the bytes.
    pub fn measure(&mut self, limit: Limit) -> Result<Duration, Failure> {
        match limit {
            Limit::Memory => Ok(self.copy()),
            Limit::DiskWrite | Limit::DiskRead => self.transfer(limit).map_err(Failure::Limit),
            Limit::ToHost | Limit::ToDevice => {
                let begin = Instant::now();
                if let Some(wire) = &self.wire {
                    wire.copy(limit == Limit::ToDevice)?;
                }
                Ok(begin.elapsed())
            }
        }
    }

    /// A plain copy, each thread its share; from the first that begins to the last that ends.
    fn copy(&mut self) -> Duration {
        let share = self.from.length().to_usize().div_ceil(self.threads).max(1);
        let (from, to) = (&self.from, &mut self.to);
        let pairs = bytes(from).chunks(share).zip(bytes_mut(to).chunks_mut(share));
        let ready = Barrier::new(pairs.len());
        let times: Vec<(Instant, Instant)> = thread::scope(|scope| {
            let copies = pairs.map(|(from, to)| {
                let ready = &ready;
                scope.spawn(move || {
                    ready.wait();
                    let begin = Instant::now();
                    to.copy_from_slice(from);
                    (begin, Instant::now())
                })
            });
            // All of them are started before the first is waited for.
            let copies: Vec<_> = copies.collect();
            copies.into_iter().filter_map(|copy| copy.join().ok()).collect()
        });
        let begin = times.iter().map(|(begin, _)| *begin).min();
        let end = times.iter().map(|(_, end)| *end).max();
        begin.zip(end).map_or(Duration::ZERO, |(begin, end)| end - begin)
    }

    /// The whole file by requests of one size, in order.
    fn transfer(&mut self, limit: Limit) -> Result<Duration, StorageError> {
        let handle = self.file.handle();
        let target = IoFile::direct(&handle).unwrap_or(IoFile::buffered(&handle));
        let length = self.file.length().get();
        let (mut offset, mut completions) = (0, Vec::new());
        let begin = Instant::now();
        while offset < length || self.queue.in_flight() > 0 {
            while offset < length && self.queue.has_room() {
                let size = self.request.get().min(length - offset);
                let buffer = self.buffer(offset, size);
                let place = ByteCount::new(offset);
                let request = match limit {
                    Limit::DiskRead => IoRequest::read(offset, target, place, &buffer),
                    _ => IoRequest::write(offset, target, place, &buffer),
                };
                // SAFETY: this call returns when nothing is in flight, or with an error that ends the
                // program. Then the queue drops, and waits, before buffers and file do. No other
                // code has this value meanwhile, and each part of the buffer has one request.
                unsafe { self.queue.submit(&request) }?;
                offset += size;
            }
            self.queue.wait(None, &mut completions)?;
            for completion in completions.drain(..) {
                completion.outcome?;
            }
        }
        Ok(begin.elapsed())
    }

    /// A part of the buffer; none if it had no address, which memory of the host always has.
    fn buffer(&self, offset: u64, size: u64) -> Vec<IoBuffer> {
        let base = self.from.location().as_host();
        let address = base.and_then(|base| base.checked_add(ByteCount::new(offset)));
        let length = ByteCount::new(size);
        address.map(|address| IoBuffer { address, length }).into_iter().collect()
    }
}

fn bytes(memory: &SystemMemory) -> &[u8] {
    match memory.location().as_host() {
        // SAFETY: the kernel has zeroed the bytes, the memory is borrowed as long as they are, and no
        // code writes them meanwhile.
        Some(address) => unsafe {
            slice::from_raw_parts(address.as_ptr(), memory.length().to_usize())
        },
        None => &[],
    }
}

fn bytes_mut(memory: &mut SystemMemory) -> &mut [u8] {
    match memory.location().as_host() {
        // SAFETY: as above, and the memory is borrowed for this alone.
        Some(address) => unsafe {
            slice::from_raw_parts_mut(address.as_ptr(), memory.length().to_usize())
        },
        None => &mut [],
    }
}
