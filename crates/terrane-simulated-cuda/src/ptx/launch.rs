//! A launch: the threads of the blocks of a grid, in no guaranteed order.

use std::sync::Arc;

use super::Kernel;
use super::arithmetic::LANES;
use super::warp::{Machine, Stop, Warp};
use crate::arena::{to_usize, wide};
use crate::code::{Code, Outcome, Progress};
use crate::random::Random;
use crate::space::{Reach, Space};

/// The maximum number of bytes of a block's shared memory.
const MOST_SHARED: u64 = 227 << 10;

/// In one launch of so many, each thread runs up to its next barrier alone. A kernel without a
/// barrier that its threads need then gives wrong results, even if they are of one warp.
const SEPARATE: u64 = 128;

/// A kernel with its arguments, and its progress.
#[derive(Debug)]
pub struct Launch {
    kernel: Arc<Kernel>,
    parameters: Vec<u8>,
    grid: [u32; 3],
    block: [u32; 3],
    shared: usize,
    /// The number of warps, or of blocks if they have barriers; and how many have run.
    units: u64,
    done: u64,
    /// The order of these units: the n-th is `first + step * n`.
    order: Option<(u64, u64)>,
    /// The number of threads that run together.
    together: usize,
}

impl Launch {
    /// # Errors
    ///
    /// An invalid value for an empty grid or block, for too many threads in a block, and for too
    /// much shared memory.
    pub fn new(
        kernel: Arc<Kernel>,
        arguments: Vec<Vec<u8>>,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
    ) -> Outcome<Self> {
        let product = |numbers: [u32; 3]| {
            numbers.iter().try_fold(1_u64, |all, &one| all.checked_mul(u64::from(one)))
        };
        let blocks = product(grid).filter(|&blocks| blocks > 0).ok_or(Code::INVALID_VALUE)?;
        let threads = product(block).filter(|&threads| threads > 0).ok_or(Code::INVALID_VALUE)?;
        if threads > 1024 {
            return Err(Code::INVALID_VALUE);
        }
        if threads > kernel.most_threads {
            return Err(Code::LAUNCH_OUT_OF_RESOURCES);
        }
        let shared = kernel.shared + to_usize(u64::from(shared));
        if wide(shared) > MOST_SHARED {
            return Err(Code::INVALID_VALUE);
        }
        let mut parameters = Vec::new();
        for (&(offset, size), argument) in kernel.parameters.iter().zip(arguments) {
            if argument.len() != size {
                return Err(Code::INVALID_VALUE);
            }
            parameters.resize(offset, 0);
            parameters.extend(argument);
        }
        let units =
            if kernel.has_barriers { blocks } else { blocks * threads.div_ceil(wide(LANES)) };
        Ok(Self {
            kernel,
            parameters,
            grid,
            block,
            shared,
            units,
            done: 0,
            order: None,
            together: LANES,
        })
    }

    /// Runs some of the warps, or of the blocks.
    ///
    /// # Errors
    ///
    /// The code that loses the context.
    pub fn step(
        &mut self,
        space: &Space,
        reach: Reach<'_>,
        random: &mut Random,
    ) -> Outcome<Progress> {
        let (first, stride) = *self.order.get_or_insert_with(|| {
            let mut stride = 1 + random.below(self.units);
            while greatest_common_divisor(stride, self.units) != 1 {
                stride += 1;
            }
            if random.below(SEPARATE) == 0 {
                self.together = 1;
            }
            (random.below(self.units), stride)
        });
        let kernel = Arc::clone(&self.kernel);
        let mut machine = Machine {
            kernel: &kernel,
            parameters: &self.parameters,
            grid: self.grid,
            block: self.block,
            space,
            reach,
            windows: [None; 4],
        };
        let part = 1 + random.below(self.units / 2 + 1);
        let end = (self.done + part).min(self.units);
        for number in self.done..end {
            let unit = u128::from(first) + u128::from(stride) * u128::from(number);
            let unit = u64::try_from(unit % u128::from(self.units)).unwrap_or(0);
            self.run(unit, &mut machine)?;
        }
        self.done = end;
        Ok(if self.done == self.units { Progress::Finished } else { Progress::Some })
    }

    fn run(&self, unit: u64, machine: &mut Machine<'_>) -> Outcome {
        let threads: u64 = self.block.iter().map(|&one| u64::from(one)).product();
        let (block, threads) = if self.kernel.has_barriers {
            (unit, 0..threads)
        } else {
            let warps = threads.div_ceil(wide(LANES));
            let first = unit % warps * wide(LANES);
            (unit / warps, first..(first + wide(LANES)).min(threads))
        };
        let block = place(block, self.grid);
        let mut shared = vec![0; self.shared];
        let threads: Vec<[u32; 3]> = threads.map(|thread| place(thread, self.block)).collect();
        let parts = threads.chunks(self.together).zip((0..).step_by(self.together));
        let warp = |(threads, first): (&[_], usize)| {
            Warp::new(&self.kernel, threads, first % LANES, block)
        };
        let mut running: Vec<Warp> = parts.map(warp).collect();
        while !running.is_empty() {
            let mut waiting = Vec::new();
            for mut warp in running {
                if warp.run(machine, &mut shared)? == Stop::Barrier {
                    waiting.push(warp);
                }
            }
            // All threads that have not ended have reached the barrier.
            running = waiting;
        }
        Ok(())
    }
}

/// The coordinates of element `number` of `of[0] * of[1] * of[2]`.
fn place(number: u64, of: [u32; 3]) -> [u32; 3] {
    let [x, y, _] = of.map(u64::from);
    let (x, y) = (x.max(1), y.max(1));
    [number % x, number / x % y, number / x / y].map(|part| u32::try_from(part).unwrap_or(0))
}

fn greatest_common_divisor(mut left: u64, mut right: u64) -> u64 {
    while right != 0 {
        (left, right) = (right, left % right);
    }
    left
}
