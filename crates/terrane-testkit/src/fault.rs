//! An allocator with injected failures.

use std::fmt;
use std::sync::Mutex;

use terrane_core::{Allocate, AllocateError, Limits, RegionRequest, StorageKind};

use crate::random::Seeded;
use terrane_core::sync::lock;

/// Which requests fail.
#[derive(Default)]
#[non_exhaustive]
pub enum Failing {
    /// None.
    #[default]
    Never,
    /// The n-th request, counted from 0.
    Call(u64),
    /// Those for which this is true.
    When(Box<dyn Fn(&RegionRequest) -> bool + Send + Sync>),
    /// One of so many, at random.
    Randomly {
        /// The same seed fails the same requests.
        seed: u64,
        /// The average number of requests per failure.
        one_in: usize,
    },
}

impl fmt::Debug for Failing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Never => f.write_str("Never"),
            Self::Call(call) => f.debug_tuple("Call").field(call).finish(),
            Self::When(_) => f.debug_tuple("When").finish_non_exhaustive(),
            Self::Randomly { seed, one_in } => {
                f.debug_struct("Randomly").field("seed", seed).field("one_in", one_in).finish()
            }
        }
    }
}

/// An allocator that refuses some of the requests to another one.
#[derive(Debug)]
pub struct FaultInjectingAllocator<A> {
    inner: A,
    failing: Failing,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    calls: u64,
    random: Seeded,
}

/// The cause of an injected failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("injected fault in request {call}")]
pub struct InjectedRefusal {
    /// The number of the request, counted from 0.
    pub call: u64,
}

impl<A> FaultInjectingAllocator<A> {
    /// Allocates from `inner`, except for the requests that `failing` selects.
    pub fn new(inner: A, failing: Failing) -> Self {
        let seed = if let Failing::Randomly { seed, .. } = failing { seed } else { 0 };
        Self { inner, failing, state: Mutex::new(State { calls: 0, random: Seeded::new(seed) }) }
    }

    /// The inner allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }

    /// The number of requests so far.
    #[must_use]
    pub fn calls(&self) -> u64 {
        lock(&self.state).calls
    }
}

// SAFETY: the memory is the upstream's, which gives it to no other code.
unsafe impl<A: Allocate> Allocate for FaultInjectingAllocator<A> {
    type Memory = A::Memory;

    fn kind(&self) -> StorageKind {
        self.inner.kind()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn allocate(&self, request: &RegionRequest) -> Result<A::Memory, AllocateError> {
        let mut state = lock(&self.state);
        let call = state.calls;
        state.calls += 1;
        let fails = match &self.failing {
            Failing::Never => false,
            Failing::Call(number) => *number == call,
            Failing::When(predicate) => predicate(request),
            Failing::Randomly { one_in, .. } => state.random.once_in(*one_in),
        };
        drop(state);
        if fails {
            return Err(AllocateError::OutOfMemory {
                kind: self.inner.kind(),
                requested: request.bytes,
                available: None,
                label: request.label.clone(),
                source: Some(Box::new(InjectedRefusal { call })),
            });
        }
        self.inner.allocate(request)
    }
}

/// Runs `action` with an allocator whose first request fails, then with one whose second request
/// fails, and so on until no request fails. Returns the number of failures. After each failure,
/// `nothing_left` checks for leaks.
///
/// # Panics
///
/// If `action` succeeds although one of its requests failed, or fails although none did.
pub fn fail_each_request<A: Allocate, T, E: fmt::Debug>(
    allocator: impl Fn() -> A,
    mut action: impl FnMut(&FaultInjectingAllocator<A>) -> Result<T, E>,
    mut nothing_left: impl FnMut(&A),
) -> u64 {
    for call in 0.. {
        let failing = FaultInjectingAllocator::new(allocator(), Failing::Call(call));
        let result = action(&failing);
        let met = failing.calls() > call;
        match (met, &result) {
            (true, Ok(_)) => panic!("request {call} was refused, and the action succeeded"),
            (true, Err(_)) => nothing_left(failing.inner()),
            (false, Ok(_)) => return call,
            (false, Err(error)) => {
                panic!("the action failed although no request was refused: {error:?}")
            }
        }
    }
    unreachable!("the number of requests does not end")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HeapAllocator;
    use terrane_core::ByteCount;

    #[test]
    fn each_request_fails_once_and_then_none() {
        let request = RegionRequest::new(ByteCount::new(8));
        let three = |allocator: &FaultInjectingAllocator<HeapAllocator>| {
            (0..3).map(|_| allocator.allocate(&request)).collect::<Result<Vec<_>, _>>()
        };
        let failed =
            fail_each_request(HeapAllocator::system, three, HeapAllocator::assert_all_freed);
        assert_eq!(failed, 3);
    }
}
