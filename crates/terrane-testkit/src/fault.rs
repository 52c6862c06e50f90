//! An allocator with repeatable, deliberate failures.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use terrane_core::{Allocate, AllocateError, ByteCount, Label, RegionRequest, delegate_allocate};

use crate::delayed::Delayed;
use crate::random::Seeded;

/// An upstream that fails according to a [`FaultPlan`]. A deliberate failure does not reach the
/// upstream.
#[derive(Debug)]
pub struct Faulty<A> {
    upstream: A,
    plan: FaultPlan,
    calls: AtomicU64,
    injected: AtomicU64,
}

/// The calls that fail: those that at least one rule selects. Calls count from 0.
///
/// The plan depends only on the number of the call and on the request, so a run repeats. With
/// several threads, the threads' order of calls does not repeat.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    rules: Vec<Rule>,
    is_backend_failure: bool,
}

#[derive(Clone, Debug)]
enum Rule {
    Call(u64),
    From(u64),
    Every(u64),
    Random { parts_per_million: u32, seed: u64 },
    Larger(ByteCount),
    Labelled(Label),
}

impl FaultPlan {
    /// Creates a plan without failures.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes call number `call` fail.
    #[must_use]
    pub fn fail_call(self, call: u64) -> Self {
        self.with(Rule::Call(call))
    }

    /// Makes call number `call` and all later ones fail.
    #[must_use]
    pub fn fail_from(self, call: u64) -> Self {
        self.with(Rule::From(call))
    }

    /// Makes each call fail whose number, counted from 1, is a multiple of `period`. With a period
    /// of 0, no call fails.
    #[must_use]
    pub fn fail_every(self, period: u64) -> Self {
        self.with(Rule::Every(period))
    }

    /// Makes this many of a million calls fail, chosen by the seed and the number of the call.
    #[must_use]
    pub fn fail_randomly(self, parts_per_million: u32, seed: u64) -> Self {
        self.with(Rule::Random { parts_per_million, seed })
    }

    /// Makes requests of more than `bytes` fail.
    #[must_use]
    pub fn fail_larger_than(self, bytes: ByteCount) -> Self {
        self.with(Rule::Larger(bytes))
    }

    /// Makes requests with this label fail.
    #[must_use]
    pub fn fail_labelled(self, label: impl Into<Label>) -> Self {
        self.with(Rule::Labelled(label.into()))
    }

    /// Makes failures report a broken backend instead of exhaustion.
    #[must_use]
    pub fn as_backend_failure(self) -> Self {
        Self { is_backend_failure: true, ..self }
    }

    fn with(mut self, rule: Rule) -> Self {
        self.rules.push(rule);
        self
    }

    fn fails(&self, call: u64, request: &RegionRequest) -> bool {
        self.rules.iter().any(|rule| match rule {
            Rule::Call(number) => call == *number,
            Rule::From(first) => call >= *first,
            Rule::Every(period) => *period > 0 && (call + 1).is_multiple_of(*period),
            Rule::Random { parts_per_million, seed } => {
                // A separate generator for each call: the result is the same in any order of calls.
                let seed = Seeded::new(*seed).next_u64() ^ call;
                Seeded::new(seed).next_u64() % 1_000_000 < u64::from(*parts_per_million)
            }
            Rule::Larger(bytes) => request.bytes > *bytes,
            Rule::Labelled(label) => request.label == *label,
        })
    }
}

impl<A: Allocate> Faulty<A> {
    /// Makes `upstream` fail according to `plan`.
    #[must_use]
    pub fn new(upstream: A, plan: FaultPlan) -> Self {
        Self { upstream, plan, calls: AtomicU64::new(0), injected: AtomicU64::new(0) }
    }

    /// Returns the upstream.
    pub fn inner(&self) -> &A {
        &self.upstream
    }

    /// Returns the number of calls.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns the number of deliberate failures.
    #[must_use]
    pub fn injected(&self) -> u64 {
        self.injected.load(Ordering::Relaxed)
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other caller.
unsafe impl<A: Allocate> Allocate for Faulty<A> {
    type Memory = A::Memory;

    delegate_allocate!(self, self.upstream);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if !self.plan.fails(call, request) {
            return self.upstream.allocate(request);
        }
        self.injected.fetch_add(1, Ordering::Relaxed);
        let (kind, requested) = (self.kind(), request.bytes);
        let (label, source) = (request.label.clone(), Box::new(InjectedRefusal { call }));
        Err(if self.plan.is_backend_failure {
            AllocateError::Backend { kind, requested, label, source }
        } else {
            let source = Some(source as _);
            AllocateError::OutOfMemory { kind, requested, available: None, label, source }
        })
    }
}

/// The cause of a deliberate failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("injected fault in request {call}")]
pub struct InjectedRefusal {
    /// The number of the call, from 0.
    pub call: u64,
}

/// Wraps faults around any upstream, in a stack of adaptors.
pub trait InjectFaults: Allocate + Sized {
    /// Makes the calls fail that `plan` selects.
    fn failing(self, plan: FaultPlan) -> Faulty<Self> {
        Faulty::new(self, plan)
    }

    /// Frees each dropped block only after `delay` more have been dropped.
    fn delayed(self, delay: usize) -> Delayed<Self> {
        Delayed::new(self, delay)
    }
}

impl<A: Allocate> InjectFaults for A {}

/// Runs `action` with an allocator whose first request fails, then with one whose second request
/// fails, and so on until no request fails. Returns the number of failures. After each failure,
/// `nothing_left` checks for leaks.
///
/// # Panics
///
/// If `action` succeeds although one of its requests failed, or fails although none did.
pub fn fail_each_request<A: Allocate, T, E: fmt::Debug>(
    allocator: impl Fn() -> A,
    mut action: impl FnMut(&Faulty<A>) -> Result<T, E>,
    mut nothing_left: impl FnMut(&A),
) -> u64 {
    for call in 0.. {
        let failing = Faulty::new(allocator(), FaultPlan::new().fail_call(call));
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
    use crate::simulated::{Simulated, SimulatedOptions};

    fn failures(plan: FaultPlan, requests: &[RegionRequest]) -> Vec<usize> {
        let source = Faulty::new(Simulated::new(SimulatedOptions::default()), plan);
        let failed: Vec<_> = requests
            .iter()
            .enumerate()
            .filter_map(|(index, request)| source.allocate(request).err().map(|_| index))
            .collect();
        assert_eq!(source.injected(), failed.len() as u64);
        assert_eq!(source.calls(), requests.len() as u64);
        failed
    }

    #[test]
    fn each_rule_selects_its_calls() {
        let requests: Vec<_> = (0..8_u64)
            .map(|i| {
                let label = if i == 3 { "odd one" } else { "" };
                RegionRequest::new(ByteCount::new(i)).labelled(label)
            })
            .collect();
        let plan = FaultPlan::new;
        assert_eq!(failures(plan(), &requests), [0; 0]);
        assert_eq!(failures(plan().fail_call(2), &requests), [2]);
        assert_eq!(failures(plan().fail_from(6), &requests), [6, 7]);
        assert_eq!(failures(plan().fail_every(3), &requests), [2, 5]);
        assert_eq!(failures(plan().fail_larger_than(ByteCount::new(6)), &requests), [7]);
        assert_eq!(failures(plan().fail_labelled("odd one").fail_call(0), &requests), [0, 3]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "draws too many numbers for Miri, and has no unsafe code")]
    fn randomness_repeats_and_keeps_its_rate() {
        let requests = vec![RegionRequest::new(ByteCount::new(1)); 10_000];
        let first = failures(FaultPlan::new().fail_randomly(100_000, 1), &requests);
        assert_eq!(first, failures(FaultPlan::new().fail_randomly(100_000, 1), &requests));
        assert_ne!(first, failures(FaultPlan::new().fail_randomly(100_000, 2), &requests));
        assert!((800..1200).contains(&first.len()), "{}", first.len());
    }

    #[test]
    fn each_request_fails_once_and_then_none() {
        let request = RegionRequest::new(ByteCount::new(8));
        let three = |allocator: &Faulty<HeapAllocator>| {
            (0..3).map(|_| allocator.allocate(&request)).collect::<Result<Vec<_>, _>>()
        };
        let failed =
            fail_each_request(HeapAllocator::system, three, HeapAllocator::assert_all_freed);
        assert_eq!(failed, 3);
    }
}
