//! Functions that only a simulated driver has. A test finds them like the driver's functions.

use std::ffi::c_char;

use crate::arena::wide;
use crate::code::{Code, Outcome};
use crate::exports::arguments::{In, Out};
use crate::exports::entry::{calls_of, exports, known};
use crate::space::Pieces;
use crate::state::{State, Stream, StreamKind};

exports! {
    /// Makes one call of the driver's function of this name return `code`: the call after `spared`
    /// further calls. Several faults of one function occur one after the other.
    fn terraneSimulatedFail(function: In<c_char>, spared: u64, code: u32) |simulator, _caller| {
        let function = function.text()?.to_str().map_err(|_| Code::INVALID_VALUE)?;
        simulator.with(|state| state.faults.fail(function, spared, Code(code)));
        Ok(())
    }

    /// Makes every call of the driver's function of this name return `code`, until the faults are
    /// cleared.
    fn terraneSimulatedRefuse(function: In<c_char>, code: u32) |simulator, _caller| {
        let function = function.text()?.to_str().map_err(|_| Code::INVALID_VALUE)?;
        simulator.with(|state| state.faults.refuse(function, Code(code)));
        Ok(())
    }

    /// Loses a device's primary context with `code`, at the operation of its streams after `spared`
    /// further operations.
    fn terraneSimulatedLose(device: i32, spared: u64, code: u32) |simulator, _caller| {
        let device = known(simulator, device)?;
        simulator.with(|state| {
            let context = state.device(device)?.primary.ok_or(Code::INVALID_CONTEXT)?;
            state.faults.lose(context, spared, Code(code));
            Ok(())
        })
    }

    /// Loses a device's primary context with `code` at once.
    fn terraneSimulatedLoseNow(device: i32, code: u32) |simulator, _caller| {
        let device = known(simulator, device)?;
        simulator.with(|state| {
            let context = state.device(device)?.primary.ok_or(Code::INVALID_CONTEXT)?;
            state.lose(context, Code(code));
            Ok(())
        })
    }

    /// Removes the faults that have not occurred, and returns their number.
    fn terraneSimulatedClearFaults(count: Out<u64>) |simulator, _caller| {
        let pending = simulator.with(|state| {
            let pending = state.faults.pending();
            state.faults.clear();
            pending
        });
        count.set_if_wanted(wide(pending));
        Ok(())
    }

    /// Makes the driver report one allocation as several, with a border at each multiple of 2 MiB.
    /// They are mapped there (1), or are adjacent by chance (2).
    fn terraneSimulatedPieces(address: u64, sort: u32) |simulator, _caller| {
        let pieces = match sort {
            0 => Pieces::One,
            1 => Pieces::Mapped,
            2 => Pieces::Neighbours,
            _ => return Err(Code::INVALID_VALUE),
        };
        simulator.with(|state| {
            state.space.allocation(address).ok_or(Code::INVALID_VALUE)?.pieces = pieces;
            Ok(())
        })
    }

    /// Holds back the work of a created stream, including work that is submitted later, until it
    /// is released.
    fn terraneSimulatedHold(stream: u64) |simulator, _caller| {
        simulator.with(|state| hold(state, stream, true))
    }

    /// Releases a stream's work.
    fn terraneSimulatedRelease(stream: u64) |simulator, _caller| {
        simulator.with(|state| hold(state, stream, false))
    }

    /// Lets at most `most` further operations of all streams run. The largest number removes the
    /// limit.
    fn terraneSimulatedLimit(most: u64) |simulator, _caller| {
        simulator.with(|state| state.operations_left = (most != u64::MAX).then_some(most));
        Ok(())
    }

    /// Runs up to `most` steps of streams that are ready, and returns their number.
    fn terraneSimulatedStep(most: u64, done: Out<u64>) |simulator, _caller| {
        let mut steps = 0;
        simulator.with(|state| while steps < most && state.step_any() { steps += 1 });
        done.set_if_wanted(steps);
        Ok(())
    }

    /// The number of the calling thread's calls of the driver's function of this name; of all
    /// functions, if the name is null.
    fn terraneSimulatedCalls(function: In<c_char>, count: Out<u64>) |_simulator, _caller| {
        let name = if function.is_null() { None } else { Some(function.text()?) };
        let name = name.map(|name| name.to_str().map_err(|_| Code::INVALID_VALUE)).transpose()?;
        count.set(calls_of(name))
    }

    /// The number of resources of one kind. The kinds are 0 contexts, 1 created streams, 2 events,
    /// 3 allocations of device memory and 4 spans of pinned memory. Further kinds are 5 created
    /// pools, 6 modules and 7 operations that have not run.
    fn terraneSimulatedCount(sort: u32, count: Out<u64>) |simulator, _caller| {
        count.set(simulator.with(|state| count_of(state, sort))?)
    }
}

fn hold(state: &mut State, stream: u64, is_held: bool) -> Outcome {
    state.streams.get_mut(&stream).ok_or(Code::INVALID_HANDLE)?.is_held = is_held;
    Ok(())
}

fn count_of(state: &State, sort: u32) -> Outcome<u64> {
    let (allocations, pinned) = state.space.counts();
    let streams = state.streams.values();
    Ok(wide(match sort {
        0 => state.contexts.len(),
        1 => streams.filter(|stream| is_created(stream)).count(),
        2 => state.events.len(),
        3 => allocations,
        4 => pinned,
        5 => state.pools.len() - state.devices.len(),
        6 => state.modules.len(),
        7 => streams.map(|stream| stream.queue.len()).sum(),
        _ => return Err(Code::INVALID_VALUE),
    }))
}

fn is_created(stream: &Stream) -> bool {
    stream.kind == StreamKind::Created && !stream.is_destroyed
}
