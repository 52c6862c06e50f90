//! Streams that are captured into graphs: what calls end a capture, and what is dragged into one.

use crate::code::{Code, Outcome};
use crate::state::State;

/// The calls that a capture forbids, and the calls that a thread may make beside one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureMode {
    /// For a capture: no thread may make calls that might disturb it. For a thread: it makes none.
    Global,
    /// Only the thread that captures makes none.
    ThreadLocal,
    /// Anything goes.
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

/// A capture that has begun.
#[derive(Debug)]
pub struct Capture {
    /// The stream on which it began.
    origin: u64,
    thread: u64,
    mode: CaptureMode,
    is_invalid: bool,
}

/// Calls that might disturb a capture of another thread: calls that wait or query, and those that
/// may do so in a driver that has to free memory.
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
    /// Notes a call of a thread of this mode.
    ///
    /// # Errors
    ///
    /// That it is forbidden now; the captures that forbid it have come to nothing.
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

    /// Ends a capture. Streams that joined it must be joined back to its first stream, which is not
    /// simulated: here a capture of several streams cannot be ended.
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

    /// Whether a stream is captured: 0 no, 1 yes, 2 by a capture that has come to nothing.
    pub fn status_of(&self, stream: u64) -> u32 {
        let capture = self.streams.get(&stream).and_then(|own| own.capture);
        match capture.and_then(|number| self.captures.get(&number)) {
            None => 0,
            Some(Capture { is_invalid: false, .. }) => 1,
            Some(Capture { is_invalid: true, .. }) => 2,
        }
    }

    /// A stream is asked, or waited for, which one that is captured cannot be.
    pub fn ask_of_stream(&mut self, stream: u64) -> Outcome {
        let capture = self.streams.get(&stream).and_then(|own| own.capture);
        match capture.and_then(|number| self.captures.get_mut(&number)) {
            None => Ok(()),
            Some(capture) => {
                capture.is_invalid = true;
                Err(Code::STREAM_CAPTURE_UNSUPPORTED)
            }
        }
    }

    /// An event is asked, or waited for, which one that marks a place in a graph cannot be: that ends
    /// the capture, whatever the mode of the thread.
    pub fn ask_of_event(&mut self, event: u64) -> Outcome {
        let Some(number) = self.events.get(&event).and_then(|event| event.captured) else {
            return Ok(());
        };
        if let Some(capture) = self.captures.get_mut(&number) {
            capture.is_invalid = true;
        }
        Err(Code::CAPTURED_EVENT)
    }

    /// A stream waits for an event: one of a capture drags it in.
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
