//! Copies and fills.

use crate::arena::wide;
use crate::code::{Code, Outcome};
use crate::exports::arguments::{In, Out};
use crate::exports::entry::exports;
use crate::simulator::Simulator;
use crate::space::{Place, Reach, host_pointer};
use crate::state::{Caller, Mark, State};
use crate::work::{Source, Transfer, Work, staged};

/// `CUmemcpyAttributes`: the order in which the source is read, and hints.
pub type Attributes = [u32; 6];

const ORDER_STREAM: u32 = 1;
const ORDER_DURING_CALL: u32 = 2;
const ORDER_ANY: u32 = 3;

exports! {
    fn cuMemcpyAsync(to: u64, from: u64, length: usize, stream: u64) |simulator, caller| {
        copy(simulator, caller, (to, from, length), stream)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, length: usize, stream: u64) |simulator, caller| {
        copy(simulator, caller, (to, from, length), stream)
    }

    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, length: usize, stream: u64) |simulator, caller| {
        copy(simulator, caller, (to, from, length), stream)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, length: usize, stream: u64) |simulator, caller| {
        copy(simulator, caller, (to, from, length), stream)
    }

    fn cuMemcpyPeerAsync(
        to: u64, to_context: u64, from: u64, from_context: u64, length: usize, stream: u64,
    ) |simulator, caller| {
        simulator.with(|state| {
            for (address, context) in [(to, to_context), (from, from_context)] {
                let device = state.context(context)?.device;
                match state.space.place(address, wide(length))? {
                    Place::Device { allocation, .. } if allocation.device == device => {}
                    _ => return Err(Code::INVALID_VALUE),
                }
            }
            Ok(())
        })?;
        copy(simulator, caller, (to, from, length), stream)
    }

    fn cuMemcpy(to: u64, from: u64, length: usize) |simulator, caller| {
        copy_now(simulator, caller, (to, from, length))
    }

    fn cuMemcpyHtoD_v2(to: u64, from: u64, length: usize) |simulator, caller| {
        copy_now(simulator, caller, (to, from, length))
    }

    fn cuMemcpyDtoH_v2(to: u64, from: u64, length: usize) |simulator, caller| {
        copy_now(simulator, caller, (to, from, length))
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, length: usize) |simulator, caller| {
        copy_now(simulator, caller, (to, from, length))
    }

    /// The copies have no order among each other.
    fn cuMemcpyBatchAsync(
        to: In<u64>, from: In<u64>, lengths: In<usize>, count: usize, attributes: In<Attributes>,
        begins: In<usize>, kinds: usize, failed: Out<usize>, stream: u64,
    ) |simulator, caller| {
        failed.set_if_wanted(usize::MAX);
        let batch = Batch { to, from, lengths, count, attributes, begins, kinds };
        batch.submit(simulator, caller, stream).map_err(|(index, code)| {
            failed.set_if_wanted(index);
            code
        })
    }

    fn cuMemcpyBatchAsync_v2(
        to: In<u64>, from: In<u64>, lengths: In<usize>, count: usize, attributes: In<Attributes>,
        begins: In<usize>, kinds: usize, stream: u64,
    ) |simulator, caller| {
        let batch = Batch { to, from, lengths, count, attributes, begins, kinds };
        batch.submit(simulator, caller, stream).map_err(|(_, code)| code)
    }

    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: u64) |simulator, caller| {
        simulator.with(|state| fill(state, caller, (to, u32::from(value), 1), count, stream))?;
        Ok(())
    }

    fn cuMemsetD16Async(to: u64, value: u16, count: usize, stream: u64) |simulator, caller| {
        simulator.with(|state| fill(state, caller, (to, u32::from(value), 2), count, stream))?;
        Ok(())
    }

    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: u64) |simulator, caller| {
        simulator.with(|state| fill(state, caller, (to, value, 4), count, stream))?;
        Ok(())
    }

    fn cuMemsetD8_v2(to: u64, value: u8, count: usize) |simulator, caller| {
        let value = u32::from(value);
        let mark = simulator.with(|state| fill(state, caller, (to, value, 1), count, 0))?;
        simulator.wait(caller.context, &mark)
    }

    fn cuMemsetD32_v2(to: u64, value: u32, count: usize) |simulator, caller| {
        let mark = simulator.with(|state| fill(state, caller, (to, value, 4), count, 0))?;
        simulator.wait(caller.context, &mark)
    }
}

/// When a submitted copy must have run.
enum Until {
    /// After the call returns.
    Submitted,
    /// Before the call returns, because the driver cannot access the memory by itself.
    Done,
}

/// The two ends of a copy, and its source bytes if they are in pageable host memory.
fn transfer(state: &State, (to, from, length): (u64, u64, u64)) -> Outcome<(Transfer, Until)> {
    let until = match state.space.place(to, length)? {
        Place::Pageable => Until::Done,
        Place::Device { .. } | Place::Pinned(_) => Until::Submitted,
    };
    let source = match state.space.place(from, length)? {
        Place::Pageable => {
            // SAFETY: the driver does not know the memory, so it belongs to the host, and the
            // caller guarantees that it is readable.
            Source::Staged(unsafe { staged(host_pointer(from), length) })
        }
        Place::Device { .. } | Place::Pinned(_) => Source::Memory(from),
    };
    Ok((Transfer::new(to, source, length), until))
}

fn copy(
    simulator: &Simulator,
    caller: Caller,
    (to, from, length): (u64, u64, usize),
    stream: u64,
) -> Outcome {
    let (context, mark) = simulator.with(|state| {
        let stream = state.stream(caller, stream)?;
        let context = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?.context;
        if length == 0 {
            return Ok((context, None));
        }
        let (transfer, until) = transfer(state, (to, from, wide(length)))?;
        let mark = state.submit(stream, Vec::new(), Work::Copies(vec![transfer]))?;
        Ok((context, matches!(until, Until::Done).then_some(mark)))
    })?;
    match mark {
        Some(mark) => simulator.wait(context, &[mark]),
        None => Ok(()),
    }
}

/// A copy on the legacy default stream, with a wait for its end.
fn copy_now(simulator: &Simulator, caller: Caller, ends: (u64, u64, usize)) -> Outcome {
    copy(simulator, caller, ends, 0)?;
    let mark = simulator.with(|state| {
        let stream = state.stream(caller, 0)?;
        let own = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
        Ok((stream, own.submitted))
    })?;
    simulator.wait(caller.context, &[mark])
}

struct Batch {
    to: In<u64>,
    from: In<u64>,
    lengths: In<usize>,
    count: usize,
    attributes: In<Attributes>,
    /// The index of the first copy to which each of the attributes applies.
    begins: In<usize>,
    kinds: usize,
}

impl Batch {
    /// # Errors
    ///
    /// The index of the refused copy, or `usize::MAX` if the whole call is refused, and the code.
    fn submit(
        self,
        simulator: &Simulator,
        caller: Caller,
        stream: u64,
    ) -> Result<(), (usize, Code)> {
        let all = |code| (usize::MAX, code);
        // "hStream must not be the legacy default stream."
        if self.count == 0 || !(1..=self.count).contains(&self.kinds) || stream <= 1 {
            return Err(all(Code::INVALID_VALUE));
        }
        simulator.with(|state| {
            let stream = state.stream(caller, stream).map_err(all)?;
            let mut copies = Vec::new();
            let mut kind = 0;
            if self.begins.get(0).map_err(all)? != 0 {
                return Err(all(Code::INVALID_VALUE));
            }
            for index in 0..self.count {
                while kind + 1 < self.kinds && self.begins.get(kind + 1).map_err(all)? <= index {
                    kind += 1;
                }
                let [order, ..] = self.attributes.get(kind).map_err(all)?;
                copies.extend(self.transfer_of(state, index, order).map_err(|code| (index, code))?);
            }
            state.submit(stream, Vec::new(), Work::Copies(copies)).map_err(all)?;
            Ok(())
        })
    }

    fn transfer_of(
        &self,
        state: &mut State,
        index: usize,
        order: u32,
    ) -> Outcome<Option<Transfer>> {
        let length = wide(self.lengths.get(index)?);
        let (to, from) = (self.to.get(index)?, self.from.get(index)?);
        if !(ORDER_STREAM..=ORDER_ANY).contains(&order) {
            return Err(Code::INVALID_VALUE);
        }
        if length == 0 {
            return Ok(None);
        }
        // The device does not access pageable memory, and a batch does not stage it.
        for address in [to, from] {
            if matches!(state.space.place(address, length)?, Place::Pageable) {
                return Err(Code::INVALID_VALUE);
            }
        }
        // In any order: now, or in the order of the stream.
        let at_once = order == ORDER_DURING_CALL || (order == ORDER_ANY && state.random.coin());
        let source = if at_once {
            let from = state.space.bytes(from, length, Reach::Engine);
            // SAFETY: the span is live: it was looked up above, under the same lock.
            Source::Staged(unsafe { staged(from.map_err(|_| Code::INVALID_VALUE)?, length) })
        } else {
            Source::Memory(from)
        };
        Ok(Some(Transfer::new(to, source, length)))
    }
}

fn fill(
    state: &mut State,
    caller: Caller,
    (to, pattern, width): (u64, u32, u64),
    count: usize,
    stream: u64,
) -> Outcome<Vec<Mark>> {
    let stream = state.stream(caller, stream)?;
    let count = wide(count);
    if count == 0 {
        return Ok(Vec::new());
    }
    let length = count.checked_mul(width).ok_or(Code::INVALID_VALUE)?;
    if !to.is_multiple_of(width) {
        return Err(Code::INVALID_VALUE);
    }
    match state.space.place(to, length)? {
        Place::Device { .. } => {}
        // It must be a device address.
        Place::Pinned(pinned) if to >= pinned.alias => {}
        Place::Pinned(_) | Place::Pageable => return Err(Code::INVALID_VALUE),
    }
    let work = Work::Fill { address: to, pattern, width, count };
    state.submit(stream, Vec::new(), work).map(|mark| vec![mark])
}
