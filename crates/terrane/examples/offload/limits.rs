//! The machine's best rates, measured in the same run as the hops.

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

use crate::device::BusLimit;
use crate::failure::Failure;

/// Two contiguous buffers and a file, each as large as the bytes of a hop.
pub struct Limits {
    // The first field, so that it drops first: it then waits for requests that are in flight after
    // an error.
    queue: IoQueue,
    from: SystemMemory,
    to: SystemMemory,
    file: DiskFile,
    request: ByteCount,
    threads: usize,
    bus: Option<BusLimit>,
}

/// The kind and direction of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Memory,
    DiskWrite,
    DiskRead,
    ToHost,
    ToDevice,
}

/// The options of the engines whose limits are measured.
pub struct Setup<'a> {
    pub threads: usize,
    pub queue: &'a IoQueueOptions,
    pub request: ByteCount,
    pub bus: Option<BusLimit>,
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
            Ok(Self { queue, from, to, file, request, threads, bus: None })
        };
        let mut limits = make().map_err(Failure::Limit)?;
        // The first pass, over blocks that are only reserved, does not count.
        limits.measure(Limit::DiskWrite)?;
        limits.bus = setup.bus;
        Ok(limits)
    }

    /// Measures one pass over all bytes.
    pub fn measure(&mut self, limit: Limit) -> Result<Duration, Failure> {
        match limit {
            Limit::Memory => Ok(self.copy()),
            Limit::DiskWrite | Limit::DiskRead => self.transfer(limit).map_err(Failure::Limit),
            Limit::ToHost | Limit::ToDevice => {
                let begin = Instant::now();
                if let Some(bus) = &self.bus {
                    bus.copy(limit == Limit::ToDevice)?;
                }
                Ok(begin.elapsed())
            }
        }
    }

    /// A plain copy by threads with equal shares, from the start of the first thread to the end of
    /// the last.
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
            // All threads are started before the first is joined.
            let copies: Vec<_> = copies.collect();
            copies.into_iter().filter_map(|copy| copy.join().ok()).collect()
        });
        let begin = times.iter().map(|(begin, _)| *begin).min();
        let end = times.iter().map(|(_, end)| *end).max();
        begin.zip(end).map_or(Duration::ZERO, |(begin, end)| end - begin)
    }

    /// Reads or writes the whole file in order, by requests of one size.
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
                // SAFETY: this call returns when nothing is in flight, or with an error that ends
                // the program. In that case the queue drops first, and waits, before the buffers
                // and the file drop. No other code uses this value meanwhile, and each part of the
                // buffer has one request.
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

    /// A part of the buffer. It is empty if the memory has no host address, which cannot happen for
    /// host memory.
    fn buffer(&self, offset: u64, size: u64) -> Vec<IoBuffer> {
        let base = self.from.location().as_host();
        let address = base.and_then(|base| base.checked_add(ByteCount::new(offset)));
        let length = ByteCount::new(size);
        address.map(|address| IoBuffer { address, length }).into_iter().collect()
    }
}

fn bytes(memory: &SystemMemory) -> &[u8] {
    match memory.location().as_host() {
        // SAFETY: the kernel has zeroed the bytes, the memory is borrowed as long as the slice, and
        // no code writes the bytes meanwhile.
        Some(address) => unsafe {
            slice::from_raw_parts(address.as_ptr(), memory.length().to_usize())
        },
        None => &[],
    }
}

fn bytes_mut(memory: &mut SystemMemory) -> &mut [u8] {
    match memory.location().as_host() {
        // SAFETY: as above, and the memory is mutably borrowed by this call alone.
        Some(address) => unsafe {
            slice::from_raw_parts_mut(address.as_ptr(), memory.length().to_usize())
        },
        None => &mut [],
    }
}
