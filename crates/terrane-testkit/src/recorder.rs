//! A journal that proves the order of acquisitions and releases.
//!
//! ```
//! use terrane_core::{Allocate, ByteCount, RegionRequest, Register};
//! use terrane_testkit::memory::HeapAllocator;
//! use terrane_testkit::recorder::{Journal, RecordingAllocator, RecordingRegistrar};
//!
//! let journal = Journal::new();
//! let allocator = RecordingAllocator::new(HeapAllocator::system(), &journal);
//! let registrar = RecordingRegistrar::new("agent", &journal);
//! let memory = allocator.allocate(&RegionRequest::new(ByteCount::kib(4))).unwrap();
//! drop(registrar.register(memory).unwrap());
//! assert_eq!(journal.lines(), ["allocate 0", "register 0", "deregister 0", "release 0"]);
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};

use terrane_core::{
    AgentName, Allocate, AllocateError, BackendName, BackendOutcome, Limits, Memory, RegionRequest,
    Register, RegisterError, Registration, RegistrationRecord, Span, StorageKind,
    delegate_allocate,
};

use terrane_core::sync::lock;

/// The events, line by line, in order. Clones share the lines.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Lines>>);

#[derive(Debug, Default)]
struct Lines {
    lines: Vec<String>,
    next: u64,
    /// The memory that is alive, by its number.
    live: BTreeMap<u64, Span>,
    /// The number of registrations, and the spans of the active ones.
    registrations: u64,
    registered: BTreeMap<u64, Span>,
}

impl Journal {
    /// An empty journal.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a line.
    pub fn note(&self, line: impl Into<String>) {
        lock(&self.0).lines.push(line.into());
    }

    /// A value that adds a line when it drops.
    #[must_use]
    pub fn note_on_drop(&self, line: impl Into<String>) -> NoteOnDrop {
        NoteOnDrop { journal: self.clone(), line: line.into() }
    }

    /// All lines so far.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        lock(&self.0).lines.clone()
    }

    /// Whether the journal has this line.
    #[must_use]
    pub fn contains(&self, line: &str) -> bool {
        lock(&self.0).lines.iter().any(|l| l == line)
    }

    /// Panics unless both lines occur once, in this order.
    #[track_caller]
    pub fn assert_before(&self, earlier: &str, later: &str) {
        let lines = self.lines();
        let place = |line: &str| {
            let mut places = lines.iter().enumerate().filter(|(_, l)| *l == line);
            match (places.next(), places.next()) {
                (Some((place, _)), None) => place,
                (None, _) => panic!("{line:?} is not in the journal: {lines:#?}"),
                (Some(_), Some(_)) => panic!("{line:?} is in the journal twice: {lines:#?}"),
            }
        };
        let in_order = place(earlier) < place(later);
        assert!(in_order, "{earlier:?} did not happen before {later:?}: {lines:#?}");
    }

    /// Whether a span is within an active registration.
    #[must_use]
    pub fn is_registered(&self, span: &Span) -> bool {
        lock(&self.0).registered.values().any(|registered| registered.covers(span))
    }

    /// The number of the live memory that contains a location.
    fn number_of(&self, span: &Span) -> Option<u64> {
        let lines = lock(&self.0);
        lines.live.iter().find(|(_, live)| live.overlaps(span)).map(|(&number, _)| number)
    }
}

/// Adds a line to its journal when it drops.
#[derive(Debug)]
pub struct NoteOnDrop {
    journal: Journal,
    line: String,
}

impl Drop for NoteOnDrop {
    fn drop(&mut self) {
        self.journal.note(std::mem::take(&mut self.line));
    }
}

/// Records allocations and releases of another allocator, and numbers its memory from 0:
/// `allocate 0`, `refuse`, `release 0`.
#[derive(Clone, Debug)]
pub struct RecordingAllocator<A> {
    inner: A,
    journal: Journal,
}

impl<A> RecordingAllocator<A> {
    /// Records the calls of `inner`.
    pub fn new(inner: A, journal: &Journal) -> Self {
        Self { inner, journal: journal.clone() }
    }

    /// The inner allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

// SAFETY: the memory is the upstream's, which returns it to no other code.
unsafe impl<A: Allocate> Allocate for RecordingAllocator<A> {
    type Memory = RecordedMemory<A::Memory>;

    delegate_allocate!(self, self.inner);

    fn allocate(&self, request: &RegionRequest) -> Result<Self::Memory, AllocateError> {
        let memory = self.inner.allocate(request).inspect_err(|_| self.journal.note("refuse"))?;
        let mut lines = lock(&self.journal.0);
        let number = lines.next;
        lines.next += 1;
        lines.live.insert(number, Span::of(&memory));
        lines.lines.push(format!("allocate {number}"));
        drop(lines);
        Ok(RecordedMemory { memory, _release: Release { journal: self.journal.clone(), number } })
    }
}

/// Memory whose release is recorded.
#[derive(Debug)]
pub struct RecordedMemory<M> {
    // Fields drop in this order: the line is added after the release.
    memory: M,
    _release: Release,
}

#[derive(Debug)]
struct Release {
    journal: Journal,
    number: u64,
}

impl Drop for Release {
    fn drop(&mut self) {
        let mut lines = lock(&self.journal.0);
        lines.live.remove(&self.number);
        lines.lines.push(format!("release {}", self.number));
    }
}

// SAFETY: all methods delegate to the memory, which lives as long as this value.
unsafe impl<M: Memory> Memory for RecordedMemory<M> {
    terrane_core::delegate_memory!(self, self.memory);
}

/// Acts as an agent that registers memory, and records it: `register 0`, `deregister 0` and `refuse
/// registration`. The numbers are those of a [`RecordingAllocator`] with the same journal.
pub struct RecordingRegistrar {
    agent: AgentName,
    journal: Journal,
    limits: Limits,
    backends: Vec<(BackendName, AcceptsKind)>,
    refuse_call: Option<u64>,
    calls: Mutex<u64>,
}

type AcceptsKind = fn(StorageKind) -> bool;

/// The refusal of a recording registrar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the test configured this backend to refuse")]
pub struct ConfiguredRefusal;

impl RecordingRegistrar {
    /// An agent of this name, with one backend `"RECORDING"` that accepts every kind.
    #[must_use]
    pub fn new(agent: &str, journal: &Journal) -> Self {
        Self {
            agent: agent.into(),
            journal: journal.clone(),
            limits: Limits::NONE,
            backends: vec![("RECORDING".into(), |_| true)],
            refuse_call: None,
            calls: Mutex::new(0),
        }
    }

    /// The same agent with these limits.
    #[must_use]
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    /// The same agent with these backends, each of which accepts the given kinds.
    #[must_use]
    pub fn with_backends(
        self,
        backends: impl IntoIterator<Item = (&'static str, AcceptsKind)>,
    ) -> Self {
        let backends = backends.into_iter().map(|(name, accepts)| (name.into(), accepts));
        Self { backends: backends.collect(), ..self }
    }

    /// The same agent, whose backends all refuse the n-th call, counted from 0.
    #[must_use]
    pub fn refusing_call(self, call: u64) -> Self {
        Self { refuse_call: Some(call), ..self }
    }

    fn refuse(&self, error: RegisterError) -> Result<Registration, RegisterError> {
        self.journal.note("refuse registration");
        Err(error)
    }
}

impl Register for RecordingRegistrar {
    fn agent(&self) -> &AgentName {
        &self.agent
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
        let mut calls = lock(&self.calls);
        let (call, agent) = (*calls, self.agent.clone());
        *calls += 1;
        drop(calls);
        let (span, kind) = (Span::of(memory), memory.kind());
        let refused_call = self.refuse_call == Some(call);
        let outcome = |(backend, accepts): &(BackendName, AcceptsKind)| BackendOutcome {
            backend: backend.clone(),
            refusal: (refused_call || !accepts(kind))
                .then(|| Arc::new(ConfiguredRefusal).into_dyn()),
        };
        let backends: Vec<_> = self.backends.iter().map(outcome).collect();
        let record = RegistrationRecord { agent: agent.clone(), span, backends };
        if record.accepted().next().is_some() {
            let number = self.journal.number_of(&span);
            let number = number.map_or_else(|| "?".to_owned(), |number| number.to_string());
            let mut lines = lock(&self.journal.0);
            let registration = lines.registrations;
            lines.registrations += 1;
            lines.registered.insert(registration, span);
            lines.lines.push(format!("register {number}"));
            drop(lines);
            let journal = self.journal.clone();
            Ok(Registration::new(record, Deregister { journal, number, registration }))
        } else if refused_call {
            self.refuse(RegisterError::Refused { agent, span, backends: record.backends })
        } else {
            self.refuse(RegisterError::UnsupportedKind { agent, kind })
        }
    }
}

/// Records the end of a registration in the journal.
struct Deregister {
    journal: Journal,
    number: String,
    registration: u64,
}

impl Drop for Deregister {
    fn drop(&mut self) {
        let mut lines = lock(&self.journal.0);
        lines.registered.remove(&self.registration);
        lines.lines.push(format!("deregister {}", self.number));
    }
}

impl ConfiguredRefusal {
    fn into_dyn(self: Arc<Self>) -> Arc<dyn std::error::Error + Send + Sync> {
        self
    }
}

impl fmt::Debug for RecordingRegistrar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordingRegistrar").field("agent", &self.agent).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HeapAllocator;
    use terrane_core::ByteCount;

    #[test]
    fn a_refused_registration_returns_the_memory_and_names_the_backend() {
        let journal = Journal::new();
        let allocator = RecordingAllocator::new(HeapAllocator::system(), &journal);
        let registrar = RecordingRegistrar::new("agent", &journal)
            .with_backends([
                ("HOST", StorageKind::is_host as AcceptsKind),
                ("GDS", |kind| kind == StorageKind::Disk),
            ])
            .refusing_call(1);
        let memory = || allocator.allocate(&RegionRequest::new(ByteCount::new(1))).expect("memory");
        let registered = registrar.register(memory()).expect("registered");
        assert!(registered.record().accepted_by(&"HOST".into()));
        assert!(!registered.record().accepted_by(&"GDS".into()));
        let failed = registrar.register(memory()).expect_err("the second call is refused");
        assert!(matches!(failed.cause, RegisterError::Refused { .. }), "{}", failed.cause);
        drop(failed);
        drop(registered);
        let expected = [
            "allocate 0",
            "register 0",
            "allocate 1",
            "refuse registration",
            "release 1",
            "deregister 0",
            "release 0",
        ];
        assert_eq!(journal.lines(), expected);
    }
}
