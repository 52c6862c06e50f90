//! The choice of the stream that runs next.

use crate::code::{Code, Outcome, Progress};
use crate::config::Policy;
use crate::state::{Mark, Operation, State, StreamKind};
use crate::work::Work;

/// The maximum length of a chain of waits that is followed. Waits point into the past, so chains
/// end. The limit only protects the stack from long chains.
const LONGEST_CHAIN: usize = 4096;

impl State {
    /// Appends work to a stream, and returns its mark.
    pub fn submit(&mut self, stream: u64, mut after: Vec<Mark>, work: Work) -> Outcome<Mark> {
        let own = self.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
        if own.capture.is_some() {
            // The work becomes part of the graph.
            return Ok((stream, own.submitted));
        }
        let (context, kind, is_blocking) = (own.context, own.kind, !own.is_non_blocking);
        // The legacy default stream waits for all other streams of its context that are not
        // non-blocking, and they wait for it.
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

    /// Whether a mark has been reached, after the step that a query causes.
    pub fn query(&mut self, mark: Mark) -> bool {
        match self.config.policy {
            Policy::Eager => while self.step_any() {},
            // The step runs after the result was computed, as late as possible.
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

    /// Runs a step towards a mark; returns whether a step was possible.
    pub fn advance(&mut self, mark: Mark) -> bool {
        match self.config.policy {
            Policy::Lazy => self.step_towards(mark),
            Policy::Eager | Policy::Random => self.step_any(),
        }
    }

    /// Whether any stream is ready.
    pub fn has_work(&self) -> bool {
        self.streams.keys().any(|&stream| self.is_ready(stream))
    }

    /// Runs a step of a ready stream, selected by the seed.
    pub fn step_any(&mut self) -> bool {
        let ready: Vec<u64> =
            self.streams.keys().copied().filter(|&stream| self.is_ready(stream)).collect();
        let picked = self.random.pick(ready.len()).and_then(|index| ready.get(index).copied());
        picked.is_some_and(|stream| self.step(stream))
    }

    /// Runs a step that leads towards a mark, if one is possible.
    pub fn step_towards(&mut self, mark: Mark) -> bool {
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
        if self.operations_left == Some(0) {
            return false;
        }
        self.streams.get(&stream).is_some_and(|stream| {
            !stream.is_held
                && stream.queue.front().is_some_and(|head| {
                    !matches!(head.work, Work::Calling)
                        && head.after.iter().all(|&mark| self.is_done(mark))
                })
        })
    }

    /// Runs a step of a ready stream.
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

    /// Records that the first operation of a stream, already removed from it, has run.
    fn finish(&mut self, stream: u64) {
        let Some(own) = self.streams.get_mut(&stream) else { return };
        own.completed += 1;
        let context = own.context;
        self.operations_left = self.operations_left.map(|left| left.saturating_sub(1));
        if own.is_destroyed && own.queue.is_empty() {
            self.streams.remove(&stream);
        }
        if let Err(code) = self.faults.operation(context) {
            self.lose(context, code);
        }
    }

    /// Records that the host function that a stream waited for has returned.
    pub fn returned(&mut self, stream: u64) {
        let Some(own) = self.streams.get_mut(&stream) else { return };
        if matches!(own.queue.front(), Some(Operation { work: Work::Calling, .. })) {
            own.queue.pop_front();
            self.finish(stream);
        }
    }

    /// Runs all work of the context that can run now.
    pub fn drain_context(&mut self, context: u64) {
        for mark in self.marks_of(context) {
            while self.step_towards(mark) {}
        }
    }
}
