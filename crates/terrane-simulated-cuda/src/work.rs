//! The work of a stream, in steps so small that other code can observe partial results.

use std::sync::Arc;

use crate::arena::{to_usize, wide};
use crate::code::{Outcome, Progress};
use crate::ptx::Launch;
use crate::random::Random;
use crate::space::{Reach, Space};

#[derive(Debug)]
pub enum Work {
    /// No work, except for an event that was recorded at this position.
    Mark(Option<u64>),
    /// Copies that run in any order, and concurrently.
    Copies(Vec<Transfer>),
    /// Writes a repeated pattern of 1, 2 or 4 bytes.
    Fill {
        address: u64,
        pattern: u32,
        width: u64,
        count: u64,
    },
    Kernel(Box<Launch>),
    /// Memory of a pool becomes allocated.
    Allocate(u64),
    /// Memory of a pool is freed.
    Free(u64),
    /// A host function must be called.
    Call {
        function: usize,
        data: usize,
    },
    /// The host function is running.
    Calling,
}

/// A copy, and its remaining part.
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

impl Transfer {
    pub const fn new(to: u64, from: Source, length: u64) -> Self {
        Self { to, from, begin: 0, end: length }
    }

    /// Copies a part, from either end.
    pub fn step(&mut self, space: &Space, random: &mut Random) -> Outcome<Progress> {
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
                // SAFETY: both spans are live: they were looked up above, under the lock that every
                // free needs. The caller guarantees pageable memory.
                unsafe { std::ptr::copy(from, to, length) };
            }
            Source::Staged(bytes) => {
                let from = bytes.get(to_usize(offset)..).unwrap_or_default();
                let length = length.min(from.len());
                // SAFETY: as above, and the copy owns the bytes.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, length) };
            }
        }
        Ok(if self.begin == self.end { Progress::Finished } else { Progress::Some })
    }
}

/// Reads host memory into a buffer of the driver.
///
/// # Safety
///
/// The span is host memory that can be read.
pub unsafe fn staged(host: *const u8, length: u64) -> Arc<[u8]> {
    debug_assert_eq!(wide(to_usize(length)), length);
    // SAFETY: the caller guarantees it.
    unsafe { std::slice::from_raw_parts(host, to_usize(length)) }.into()
}
