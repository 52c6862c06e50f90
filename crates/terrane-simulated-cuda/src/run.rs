//! Runs a stream's work, one step at a time.

use std::time::Instant;

use crate::arena::to_usize;
use crate::code::{Outcome, Progress};
use crate::space::{Reach, Space};
use crate::state::{Callback, Mark, State};
use crate::work::Work;

impl State {
    /// Runs a step of a stream's work.
    ///
    /// # Errors
    ///
    /// The code with which the context is lost.
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
        // SAFETY: the span is live: it was looked up above, under the same lock.
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
