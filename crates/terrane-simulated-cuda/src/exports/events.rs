//! Events: marks in streams.

use crate::code::{Code, Outcome};
use crate::exports::arguments::Out;
use crate::exports::entry::exports;
use crate::simulator::Simulator;
use crate::state::{Caller, Event, Mark, State};
use crate::work::Work;

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
const ALL: u32 = 7;

exports! {
    fn cuEventCreate(event: Out<u64>, flags: u32) |simulator, caller| {
        let is_odd = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
        if flags & !ALL != 0 || is_odd {
            return Err(Code::INVALID_VALUE);
        }
        event.set(simulator.with(|state| {
            state.context(caller.context)?;
            let handle = state.new_handle();
            let context = caller.context;
            state.events.insert(handle, Event { context, flags, mark: None, time: None, captured: None });
            Ok(handle)
        })?)
    }

    /// Streams that wait for the event have stored its mark.
    fn cuEventDestroy_v2(event: u64) |simulator, caller| {
        simulator.with(|state| {
            alive(state, caller, event)?;
            state.events.remove(&event);
            Ok(())
        })
    }

    fn cuEventRecord(event: u64, stream: u64) |simulator, caller| {
        record(simulator, caller, event, stream)
    }

    fn cuEventRecordWithFlags(event: u64, stream: u64, flags: u32) |simulator, caller| {
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        record(simulator, caller, event, stream)
    }

    fn cuEventQuery(event: u64) |simulator, caller| {
        simulator.with(|state| {
            let (context, mark) = alive(state, caller, event)?;
            state.check_event_query(event)?;
            let is_done = mark.is_none_or(|mark| state.query(mark));
            state.context(context)?;
            if is_done { Ok(()) } else { Err(Code::NOT_READY) }
        })
    }

    fn cuEventSynchronize(event: u64) |simulator, caller| {
        let (context, mark) = simulator.with(|state| {
            state.check_event_query(event)?;
            alive(state, caller, event)
        })?;
        match mark {
            Some(mark) => simulator.wait(context, &[mark]),
            None => Ok(()),
        }
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) |simulator, caller| {
        milliseconds.set(simulator.with(|state| elapsed(state, caller, start, end))?)
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) |simulator, caller| {
        milliseconds.set(simulator.with(|state| elapsed(state, caller, start, end))?)
    }
}

/// The event's context, which is not lost, and its mark.
fn alive(state: &mut State, caller: Caller, event: u64) -> Outcome<(u64, Option<Mark>)> {
    state.context(caller.context)?;
    let event = state.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
    let (context, mark) = (event.context, event.mark);
    state.context(context)?;
    Ok((context, mark))
}

fn record(simulator: &Simulator, caller: Caller, event: u64, stream: u64) -> Outcome {
    simulator.with(|state| {
        let (context, _) = alive(state, caller, event)?;
        let stream = state.stream(caller, stream)?;
        let own = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
        if own.context != context {
            return Err(Code::INVALID_HANDLE);
        }
        // Marked before it is submitted, because it may run at once.
        let (mark, captured) = ((stream, own.submitted + 1), own.capture);
        if let Some(event) = state.events.get_mut(&event) {
            event.mark = Some(mark).filter(|_| captured.is_none());
            event.captured = captured;
        }
        state.submit(stream, Vec::new(), Work::Mark(Some(event))).map(|_| ())
    })
}

fn elapsed(state: &mut State, caller: Caller, start: u64, end: u64) -> Outcome<f32> {
    let mut times = Vec::new();
    for event in [start, end] {
        let (_, mark) = alive(state, caller, event)?;
        let event = state.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
        let mark = mark.filter(|_| event.flags & DISABLE_TIMING == 0);
        let mark = mark.ok_or(Code::INVALID_HANDLE)?;
        match event.time {
            Some((at, time)) if at == mark => times.push((event.context, time)),
            _ => return Err(Code::NOT_READY),
        }
    }
    match times.as_slice() {
        [(of, start), (other, end)] if of == other => {
            let forth = end.saturating_duration_since(*start).as_secs_f32();
            let back = start.saturating_duration_since(*end).as_secs_f32();
            Ok((forth - back) * 1e3)
        }
        _ => Err(Code::INVALID_HANDLE),
    }
}
