//! Streams, and the host functions that they call.

use crate::capture::CaptureMode;
use crate::code::Code;
use crate::exports::arguments::Out;
use crate::exports::contexts::HIGHEST_PRIORITY;
use crate::exports::entry::{CAPTURE_MODE, exports};
use crate::state::{State, StreamKind};
use crate::work::Work;

const NON_BLOCKING: u32 = 1;

exports! {
    fn cuStreamCreate(stream: Out<u64>, flags: u32) |simulator, caller| {
        let handle = simulator.with(|state| create(state, caller.context, flags, 0))?;
        stream.set(handle)
    }

    fn cuStreamCreateWithPriority(stream: Out<u64>, flags: u32, priority: i32)
    |simulator, caller| {
        let handle = simulator.with(|state| create(state, caller.context, flags, priority))?;
        stream.set(handle)
    }

    /// Submitted work still runs.
    fn cuStreamDestroy_v2(stream: u64) |simulator, caller| {
        simulator.with(|state| {
            let handle = state.stream(caller, stream)?;
            let own = state.streams.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
            if own.kind != StreamKind::Created {
                return Err(Code::INVALID_HANDLE);
            }
            own.is_destroyed = true;
            if own.queue.is_empty() {
                state.streams.remove(&handle);
            }
            Ok(())
        })
    }

    fn cuStreamSynchronize(stream: u64) |simulator, caller| {
        let (context, mark) = simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            state.check_stream_query(stream)?;
            let own = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
            Ok((own.context, (stream, own.submitted)))
        })?;
        simulator.wait(context, &[mark])
    }

    fn cuStreamQuery(stream: u64) |simulator, caller| {
        simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            state.check_stream_query(stream)?;
            let own = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
            let (context, mark) = (own.context, (stream, own.submitted));
            let is_done = state.query(mark);
            // The step may have lost the context.
            state.context(context)?;
            if is_done { Ok(()) } else { Err(Code::NOT_READY) }
        })
    }

    /// Delays later work of the stream until the work that the event marks now. A later record of
    /// the event has no effect.
    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) |simulator, caller| {
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            state.join_capture(stream, event)?;
            let mark = state.events.get(&event).ok_or(Code::INVALID_HANDLE)?.mark;
            if let Some(mark) = mark {
                state.submit(stream, vec![mark], Work::Mark(None))?;
            }
            Ok(())
        })
    }

    fn cuStreamGetCtx(stream: u64, context: Out<u64>) |simulator, caller| {
        context.set(simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            state.streams.get(&stream).map(|own| own.context).ok_or(Code::INVALID_HANDLE)
        })?)
    }

    fn cuStreamGetFlags(stream: u64, flags: Out<u32>) |simulator, caller| {
        flags.set(simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            let own = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
            Ok(u32::from(own.is_non_blocking))
        })?)
    }

    fn cuStreamGetPriority(stream: u64, priority: Out<i32>) |simulator, caller| {
        priority.set(simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            state.streams.get(&stream).map(|own| own.priority).ok_or(Code::INVALID_HANDLE)
        })?)
    }

    /// Begins a capture: later work of the stream becomes part of a graph, which is empty here.
    fn cuStreamBeginCapture_v2(stream: u64, mode: u32) |simulator, caller| {
        simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            state.begin_capture(stream, caller.thread, CaptureMode::of(mode)?)
        })
    }

    fn cuStreamEndCapture(stream: u64, graph: Out<u64>) |simulator, caller| {
        let handle = simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            state.end_capture(stream, caller.thread)?;
            Ok(state.new_handle())
        })?;
        graph.set(handle)
    }

    fn cuGraphDestroy(_graph: u64) |_simulator, _caller| {
        Ok(())
    }

    fn cuStreamIsCapturing(stream: u64, status: Out<u32>) |simulator, caller| {
        let is_capturing = simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            Ok(state.status_of(stream))
        })?;
        status.set(is_capturing)
    }

    /// Sets the effect of the calling thread's calls on captures, and returns the previous one.
    fn cuThreadExchangeStreamCaptureMode(mode: Out<u32>) |_simulator, _caller| {
        let before = CAPTURE_MODE.get();
        let requested = CaptureMode::of(mode.read()?)?;
        CAPTURE_MODE.set(requested);
        mode.set(before.number())
    }

    fn cuLaunchHostFunc(stream: u64, function: u64, data: u64) |simulator, caller| {
        if function == 0 {
            return Err(Code::INVALID_VALUE);
        }
        simulator.with(|state| {
            let stream = state.stream(caller, stream)?;
            let number = |value: u64| usize::try_from(value).map_err(|_| Code::INVALID_VALUE);
            let work = Work::Call { function: number(function)?, data: number(data)? };
            state.submit(stream, Vec::new(), work).map(|_| ())
        })
    }
}

fn create(state: &mut State, context: u64, flags: u32, priority: i32) -> Result<u64, Code> {
    state.context(context)?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    // "If the specified priority is outside the numerical range, it will automatically be
    // clamped."
    let priority = priority.clamp(HIGHEST_PRIORITY, 0);
    Ok(state.new_stream(context, StreamKind::Created, flags & NON_BLOCKING != 0, priority))
}
