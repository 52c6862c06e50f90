//! The choice of the stream that runs next.

use crate::code::{Code, Outcome, Progress};
use crate::config::Policy;
use crate::state::{Mark, Operation, State, StreamKind};
use crate::work::Work;

/// How many streams a chain of waits is followed through. Waits point into the past, so that
/// chains end; this is only against a chain that is longer than the stack.
const LONGEST_CHAIN: usize = 4096;

impl State {
    /// Puts work at the end of a stream; answers its place.
    pub fn submit(&mut self, stream: u64, mut after: Vec<Mark>, work: Work) -> Outcome<Mark> {
        let own = self.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
        if own.capture.is_some() {
            // It goes to the graph.
            return Ok((stream, own.submitted));
        }
        let (context, kind, is_blocking) = (own.context, own.kind, !own.is_non_blocking);
        // The legacy default stream waits for all others of its context that do not opt out, and
        // they for it.
        if kind == StreamKind::Legacy {
            let others = self.streams.iter().filter(|(handle, other)| {
                other.context == context && !other.is_non_blocking && **handle != stream
            });
            after.extend(others.map(|(&handle, other)| (handle, other.submitted)));
        } else if is_blocking {
            let legacy = self.context(context)?.legacy;
            after.extend(self.streams.get(&legacy).map(|legacy_| (legacy, legacy_.submitted)));
        }
        after.retain(|&mark| !self.is_done(mark));
        let own = self.streams.get_mut(&stream).ok_or(Code::INVALID_HANDLE)?;
        own.queue.push_back(Operation { after, work });
        own.submitted += 1;
        let mark = (stream, own.submitted);
        match self.config.policy {
            Policy::Eager => while self.step_any() {},
            Policy::Lazy => {}
            Policy::Random => {
                for _ in 0..self.random.below(3) {
                    self.step_any();
                }
            }
        }
        Ok(mark)
    }

    /// Whether a place has been come to, after the progress that a question brings about.
    pub fn ask(&mut self, mark: Mark) -> bool {
        match self.config.policy {
            Policy::Eager => while self.step_any() {},
            // The step comes after the answer, as late as can be.
            Policy::Lazy => {
                let is_done = self.is_done(mark);
                self.step_towards(mark);
                return is_done;
            }
            Policy::Random => {
                for _ in 0..self.random.below(4) {
                    self.step_any();
                }
            }
        }
        self.is_done(mark)
    }

    /// Brings a place nearer; answers whether anything could be done.
    pub fn advance(&mut self, mark: Mark) -> bool {
        match self.config.policy {
            Policy::Lazy => self.step_towards(mark),
            Policy::Eager | Policy::Random => self.step_any(),
        }
    }

    /// Whether some stream could go on.
    pub fn has_work(&self) -> bool {
        self.streams.keys().any(|&stream| self.is_ready(stream))
    }

    /// Does a step of one stream that can go on, by the seed.
    pub fn step_any(&mut self) -> bool {
        let ready: Vec<u64> =
            self.streams.keys().copied().filter(|&stream| self.is_ready(stream)).collect();
        let picked = self.random.pick(ready.len()).and_then(|index| ready.get(index).copied());
        picked.is_some_and(|stream| self.step(stream))
    }

    /// Does a step that brings a place nearer, if one can be done.
    fn step_towards(&mut self, mark: Mark) -> bool {
        let mut mark = mark;
        for _ in 0..LONGEST_CHAIN {
            if self.is_done(mark) {
                return false;
            }
            let (stream, _) = mark;
            if self.is_ready(stream) {
                return self.step(stream);
            }
            let Some(head) = self.streams.get(&stream).and_then(|own| own.queue.front()) else {
                return false;
            };
            match head.after.iter().find(|&&before| !self.is_done(before)) {
                Some(&before) => mark = before,
                None => return false,
            }
        }
        self.step_any()
    }

    fn is_ready(&self, stream: u64) -> bool {
        self.streams.get(&stream).is_some_and(|stream| {
            !stream.is_held
                && stream.queue.front().is_some_and(|head| {
                    !matches!(head.work, Work::Calling)
                        && head.after.iter().all(|&mark| self.is_done(mark))
                })
        })
    }

    /// Does a step of a stream that can go on.
    fn step(&mut self, stream: u64) -> bool {
        let Some(own) = self.streams.get_mut(&stream) else { return false };
        let (context, number) = (own.context, own.completed + 1);
        let Some(mut operation) = own.queue.pop_front() else { return false };
        match self.run((stream, number), context, &mut operation.work) {
            Ok(Progress::Some) => {
                if let Some(own) = self.streams.get_mut(&stream) {
                    own.queue.push_front(operation);
                }
            }
            Ok(Progress::Finished) => self.finish(stream),
            Err(code) => self.lose(context, code),
        }
        true
    }

    /// Notes that the first operation of a stream, which is no longer in it, has run.
    fn finish(&mut self, stream: u64) {
        let Some(own) = self.streams.get_mut(&stream) else { return };
        own.completed += 1;
        let context = own.context;
        if own.is_destroyed && own.queue.is_empty() {
            self.streams.remove(&stream);
        }
        if let Err(code) = self.faults.operation(context) {
            self.lose(context, code);
        }
    }

    /// Notes that the host's function that a stream waited for has returned.
    pub fn returned(&mut self, stream: u64) {
        let Some(own) = self.streams.get_mut(&stream) else { return };
        if matches!(own.queue.front(), Some(Operation { work: Work::Calling, .. })) {
            own.queue.pop_front();
            self.finish(stream);
        }
    }

    /// Does what a stream still has to do, as far as it can be done now.
    pub fn drain_context(&mut self, context: u64) {
        for mark in self.marks_of(context) {
            while self.step_towards(mark) {}
        }
    }
}
