//! What a stream does, in steps small enough that others see it half done.

use std::sync::Arc;
use std::time::Instant;

use crate::arena::wide;
use crate::code::Outcome;
use crate::ptx::Launch;
use crate::random::Random;
use crate::space::{Reach, Space};
use crate::state::{Callback, Mark, State};

#[derive(Debug)]
pub enum Work {
    /// Nothing but its place in the stream, and the event that was recorded there.
    Mark(Option<u64>),
    /// Copies that run in any order, and at once.
    Copies(Vec<Transfer>),
    /// Writing a pattern of 1, 2 or 4 bytes again and again.
    Fill {
        address: u64,
        pattern: u32,
        width: u64,
        count: u64,
    },
    Kernel(Box<Launch>),
    /// Memory of a pool comes to be.
    Allocate(u64),
    /// Memory of a pool goes.
    Free(u64),
    /// A function of the host is to be called.
    Call {
        function: usize,
        data: usize,
    },
    /// It is being called.
    Calling,
}

/// A copy, and what of it is left.
#[derive(Debug)]
pub struct Transfer {
    to: u64,
    from: Source,
    begin: u64,
    end: u64,
}

#[derive(Debug)]
pub enum Source {
    Memory(u64),
    /// Bytes that were read when the copy was submitted.
    Staged(Arc<[u8]>),
}

/// How far a step came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Some,
    Finished,
}

impl Transfer {
    pub const fn new(to: u64, from: Source, length: u64) -> Self {
        Self { to, from, begin: 0, end: length }
    }

    /// Copies a part from either end.
    fn step(&mut self, space: &Space, random: &mut Random) -> Outcome<Progress> {
        let left = self.end - self.begin;
        let part = match left {
            0 => return Ok(Progress::Finished),
            1..=64 if random.coin() => left,
            1..=4096 => 1 + random.below(left),
            _ => (left / 4 + 1 + random.below(left)).min(left),
        };
        let offset = if random.coin() {
            self.begin += part;
            self.begin - part
        } else {
            self.end -= part;
            self.end
        };
        let (to, length) = (space.bytes(self.to + offset, part, Reach::Engine)?, to_usize(part));
        match &self.from {
            Source::Memory(from) => {
                let from = space.bytes(from + offset, part, Reach::Engine)?;
                // SAFETY: both spans are live, as was just looked up under the lock that everyone
                // who ends a span takes; pageable memory is the caller's promise.
                unsafe { std::ptr::copy(from, to, length) };
            }
            Source::Staged(bytes) => {
                let from = bytes.get(to_usize(offset)..).unwrap_or_default();
                let length = length.min(from.len());
                // SAFETY: as above, and the bytes are the copy's own.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, length) };
            }
        }
        Ok(if self.begin == self.end { Progress::Finished } else { Progress::Some })
    }
}

impl State {
    /// Does a part of a stream's work.
    ///
    /// # Errors
    ///
    /// The code that the context is lost with.
    pub fn run(&mut self, at: Mark, context: u64, work: &mut Work) -> Outcome<Progress> {
        match work {
            Work::Mark(None) => Ok(Progress::Finished),
            Work::Mark(Some(event)) => {
                if let Some(event) = self.events.get_mut(event)
                    && event.mark == Some(at)
                {
                    event.time = Some((at, Instant::now()));
                }
                Ok(Progress::Finished)
            }
            Work::Copies(copies) => {
                let Some(index) = self.random.pick(copies.len()) else {
                    return Ok(Progress::Finished);
                };
                let Some(copy) = copies.get_mut(index) else { return Ok(Progress::Finished) };
                if copy.step(&self.space, &mut self.random)? == Progress::Finished {
                    copies.swap_remove(index);
                }
                Ok(if copies.is_empty() { Progress::Finished } else { Progress::Some })
            }
            Work::Fill { address, pattern, width, count } => {
                let part = (*count / 3 + 1 + self.random.below(*count)).min(*count);
                fill(&self.space, *address, *pattern, *width, part)?;
                *address += part * *width;
                *count -= part;
                Ok(if *count == 0 { Progress::Finished } else { Progress::Some })
            }
            Work::Kernel(launch) => {
                let mut devices = Vec::new();
                if let Some(context) = self.contexts.get(&context) {
                    devices.push(context.device);
                    let peers = context.peers.iter().filter_map(|peer| self.contexts.get(peer));
                    devices.extend(peers.map(|peer| peer.device));
                }
                launch.step(&self.space, Reach::Kernel(&devices), &mut self.random)
            }
            Work::Allocate(base) => {
                if let Some(allocation) = self.space.allocation(*base) {
                    allocation.is_live = true;
                }
                Ok(Progress::Finished)
            }
            Work::Free(base) => {
                self.free_now(*base);
                Ok(Progress::Finished)
            }
            Work::Call { function, data } => {
                let (stream, _) = at;
                let callback = Callback { stream, function: *function, data: *data };
                self.callbacks.push_back(callback);
                *work = Work::Calling;
                Ok(Progress::Some)
            }
            Work::Calling => Ok(Progress::Some),
        }
    }
}

fn fill(space: &Space, address: u64, pattern: u32, width: u64, count: u64) -> Outcome {
    let to = space.bytes(address, width * count, Reach::Engine)?;
    let [first, second, ..] = pattern.to_le_bytes();
    let count = to_usize(count);
    match width {
        // SAFETY: the span is live, as was just looked up under the lock.
        1 => unsafe { to.write_bytes(first, count) },
        2 => {
            let pattern = [first, second];
            for index in 0..count {
                let to = to.cast::<[u8; 2]>().wrapping_add(index);
                // SAFETY: within the span, and bytes have no alignment.
                unsafe { to.write(pattern) };
            }
        }
        _ => {
            for index in 0..count {
                let to = to.cast::<[u8; 4]>().wrapping_add(index);
                // SAFETY: as above.
                unsafe { to.write(pattern.to_le_bytes()) };
            }
        }
    }
    Ok(())
}

/// A length that the address space of the host holds.
pub fn to_usize(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

/// Reads host memory into a buffer of the driver's own.
///
/// # Safety
///
/// The span is memory of the host that can be read.
pub unsafe fn staged(host: *const u8, length: u64) -> Arc<[u8]> {
    debug_assert_eq!(wide(to_usize(length)), length);
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(host, to_usize(length)) }.into()
}
