//! Streams that are captured into graphs: the calls that invalidate a capture, and the streams that
//! join one.

use crate::code::{Code, Outcome};
use crate::state::State;

/// The calls that a capture forbids to threads, and the calls that a thread may make during another
/// thread's capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// A capture in this mode: no thread may make unsafe calls. A thread in this mode: its calls may invalidate
    /// captures of all threads.
    Global,
    /// Only the capturing thread may make no unsafe calls.
    ThreadLocal,
    /// All calls are allowed.
    Relaxed,
}

impl CaptureMode {
    pub fn of(number: u32) -> Outcome<Self> {
        [Self::Global, Self::ThreadLocal, Self::Relaxed]
            .into_iter()
            .find(|mode| mode.number() == number)
            .ok_or(Code::INVALID_VALUE)
    }

    pub const fn number(self) -> u32 {
        match self {
            Self::Global => 0,
            Self::ThreadLocal => 1,
            Self::Relaxed => 2,
        }
    }
}

/// A capture in progress.
#[derive(Debug)]
pub struct Capture {
    /// The stream on which it began.
    origin: u64,
    thread: u64,
    mode: CaptureMode,
    is_invalid: bool,
}

/// The unsafe calls, which invalidate a capture of another thread: calls that wait or query, and
/// calls that may do so in a driver that must free memory.
const UNSAFE: [&str; 15] = [
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemcpy",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuModuleLoadDataEx",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

impl State {
    /// Records a call of a thread in this mode.
    ///
    /// # Errors
    ///
    /// The error that the call is forbidden now; it invalidates the captures that forbid it.
    pub fn disturb(&mut self, call: &str, thread: u64, mode: CaptureMode) -> Outcome {
        if mode == CaptureMode::Relaxed || !UNSAFE.contains(&call) {
            return Ok(());
        }
        let mut disturbed = Ok(());
        for capture in self.captures.values_mut() {
            let own = capture.thread == thread && capture.mode != CaptureMode::Relaxed;
            let others = mode == CaptureMode::Global && capture.mode == CaptureMode::Global;
            if own || others {
                capture.is_invalid = true;
                disturbed = Err(Code::STREAM_CAPTURE_UNSUPPORTED);
            }
        }
        disturbed
    }

    pub fn begin_capture(&mut self, stream: u64, thread: u64, mode: CaptureMode) -> Outcome {
        let number = self.new_handle();
        let own = self.streams.get_mut(&stream).ok_or(Code::INVALID_HANDLE)?;
        if own.capture.is_some() {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        own.capture = Some(number);
        let capture = Capture { origin: stream, thread, mode, is_invalid: false };
        self.captures.insert(number, capture);
        Ok(())
    }

    /// Ends a capture. Streams that joined it must be joined back to its first stream. That is not
    /// simulated, so a capture of several streams cannot be ended.
    pub fn end_capture(&mut self, stream: u64, thread: u64) -> Outcome {
        let own = self.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
        let number = own.capture.ok_or(Code::STREAM_CAPTURE_UNMATCHED)?;
        let capture = self.captures.get(&number).ok_or(Code::STREAM_CAPTURE_UNMATCHED)?;
        if capture.origin != stream {
            return Err(Code::STREAM_CAPTURE_UNMATCHED);
        }
        if capture.thread != thread && capture.mode != CaptureMode::Relaxed {
            return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
        }
        let is_invalid = capture.is_invalid;
        self.captures.remove(&number);
        let mut members = 0;
        for own in self.streams.values_mut().filter(|own| own.capture == Some(number)) {
            own.capture = None;
            members += 1;
        }
        match (is_invalid, members) {
            (true, _) => Err(Code::STREAM_CAPTURE_INVALIDATED),
            (false, 1) => Ok(()),
            (false, _) => Err(Code::STREAM_CAPTURE_UNJOINED),
        }
    }

    /// The capture status of a stream: 0 none, 1 active, 2 invalidated.
    pub fn status_of(&self, stream: u64) -> u32 {
        let capture = self.streams.get(&stream).and_then(|own| own.capture);
        match capture.and_then(|number| self.captures.get(&number)) {
            None => 0,
            Some(Capture { is_invalid: false, .. }) => 1,
            Some(Capture { is_invalid: true, .. }) => 2,
        }
    }

    /// Checks a query of a stream, or a wait for it: a captured stream permits neither.
    pub fn check_stream_query(&mut self, stream: u64) -> Outcome {
        let capture = self.streams.get(&stream).and_then(|own| own.capture);
        match capture.and_then(|number| self.captures.get_mut(&number)) {
            None => Ok(()),
            Some(capture) => {
                capture.is_invalid = true;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// Checks a query of an event, or a wait for it. If the event is part of a capture, the call
    /// invalidates the capture, whatever the mode of the thread.
    pub fn check_event_query(&mut self, event: u64) -> Outcome {
        let Some(number) = self.events.get(&event).and_then(|event| event.captured) else {
            return Ok(());
        };
        if let Some(capture) = self.captures.get_mut(&number) {
            capture.is_invalid = true;
        }
        Err(Code::CAPTURED_EVENT)
    }

    /// Makes a stream wait for an event: an event of a capture makes the stream join it.
    pub fn join_capture(&mut self, stream: u64, event: u64) -> Outcome {
        let of_event = self.events.get(&event).ok_or(Code::INVALID_HANDLE)?.captured;
        let own = self.streams.get_mut(&stream).ok_or(Code::INVALID_HANDLE)?;
        match (own.capture, of_event) {
            (None, None) => Ok(()),
            (None, Some(number)) => {
                if self.captures.contains_key(&number) {
                    own.capture = Some(number);
                    return Ok(());
                }
                Err(Code::CAPTURED_EVENT)
            }
            (Some(own), Some(other)) if own == other => Ok(()),
            (Some(_), Some(_)) => Err(Code::STREAM_CAPTURE_MERGE),
            (Some(_), None) => Err(Code::STREAM_CAPTURE_ISOLATION),
        }
    }
}
