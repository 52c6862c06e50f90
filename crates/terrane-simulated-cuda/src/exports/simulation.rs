//! Functions that only a simulation has. A test finds them like the driver's.

use std::ffi::c_char;

use crate::arena::wide;
use crate::code::{Code, Outcome};
use crate::exports::arguments::{In, Out};
use crate::exports::entry::{calls_of, exports, known};
use crate::space::Pieces;
use crate::state::{State, Stream, StreamKind};

exports! {
    /// Makes a call of the driver's function of this name answer with `code`: the one that comes
    /// after `spared` further ones. Once; several may be asked for, which come one after another.
    fn terraneSimulatedFail(function: In<c_char>, spared: u64, code: u32) |simulator, _caller| {
        let function = function.text()?.to_str().map_err(|_| Code::INVALID_VALUE)?;
        simulator.with(|state| state.faults.fail(function, spared, Code(code)));
        Ok(())
    }

    /// Makes every call of the driver's function of this name answer with `code`, until that is
    /// forgiven.
    fn terraneSimulatedRefuse(function: In<c_char>, code: u32) |simulator, _caller| {
        let function = function.text()?.to_str().map_err(|_| Code::INVALID_VALUE)?;
        simulator.with(|state| state.faults.refuse(function, Code(code)));
        Ok(())
    }

    /// Loses a device's primary context with `code`, when `spared` further operations of its
    /// streams have run, and one more.
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

    /// Forgets the faults that have not come to pass, and answers how many there were.
    fn terraneSimulatedForgive(count: Out<u64>) |simulator, _caller| {
        let pending = simulator.with(|state| {
            let pending = state.faults.pending();
            state.faults.clear();
            pending
        });
        count.set_if_wanted(wide(pending));
        Ok(())
    }

    /// Makes the driver report one allocation as many, with a border at each multiple of 2 MiB. They
    /// are mapped there (1), or are neighbours by chance (2).
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

    /// Lets a stream's work go on.
    fn terraneSimulatedLetGo(stream: u64) |simulator, _caller| {
        simulator.with(|state| hold(state, stream, false))
    }

    /// Does up to `most` steps of streams that can go on, and answers how many there were.
    fn terraneSimulatedStep(most: u64, done: Out<u64>) |simulator, _caller| {
        let mut steps = 0;
        simulator.with(|state| while steps < most && state.step_any() { steps += 1 });
        done.set_if_wanted(steps);
        Ok(())
    }

    /// How often the calling thread has called a function of the driver by this name; all of the
    /// driver's, where the name is null.
    fn terraneSimulatedCalls(function: In<c_char>, count: Out<u64>) |_simulator, _caller| {
        let name = if function.is_null() { None } else { Some(function.text()?) };
        let name = name.map(|name| name.to_str().map_err(|_| Code::INVALID_VALUE)).transpose()?;
        count.set(calls_of(name))
    }

    /// How many there are of one sort: 0 contexts, 1 streams that were created, 2 events,
    /// 3 allocations of device memory, 4 spans of pinned memory, 5 pools that were created,
    /// 6 modules, 7 operations that have not run.
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
