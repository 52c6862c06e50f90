//! The rules of [`Register`].

use std::fmt;
use std::sync::{Arc, Mutex};
use std::thread;

use terrane_core::{
    ByteCount, Memory, Region, Register, RegisterError, Registered, Span, delegate_memory,
};

use terrane_core::sync::lock;

/// Describes a registrar to its suite.
pub trait RegistrarFixture: Sync {
    /// The registrar to check. Several threads use it, so it is `Send` and `Sync`.
    type Registrar: Register + Send + Sync + 'static;
    /// Memory that it accepts.
    type Memory: Memory;

    /// A new registrar without registrations.
    fn registrar(&self) -> Self::Registrar;

    /// New memory of 8 KiB or more that the registrar accepts, under its limits.
    fn memory(&self, registrar: &Self::Registrar) -> Self::Memory;

    /// Memory of a kind that none of its backends accepts; `None` if they accept all.
    fn foreign(&self) -> Option<Region>;

    /// Returns a check whether a whole span is registered with this registrar's agent. If possible,
    /// it queries the agent's library, not the registrar's own records. It must not keep the
    /// registrar or its agent alive; once the agent has dropped, nothing is registered.
    fn probe(&self, registrar: &Self::Registrar) -> Probe;
}

/// Checks whether a whole span is registered.
pub type Probe = Arc<dyn Fn(&Span) -> bool + Send + Sync>;

/// Checks all rules. Only the suite registers the spans of the fixture's memory.
pub fn check_registrar(fixture: &impl RegistrarFixture) {
    the_record_describes_the_registration(fixture);
    registered_memory_keeps_its_properties(fixture);
    dropping_deregisters_before_the_memory_is_released(fixture);
    taking_the_memory_out_deregisters_it(fixture);
    refused_memory_is_returned_with_the_cause(fixture);
    registrations_outlive_the_registrar(fixture);
    registrations_end_on_any_thread(fixture);
    views_keep_the_registration(fixture);
    two_registrations_of_one_span_do_not_end_each_other(fixture);
    a_registration_within_another_is_independent(fixture);
    threads_register_concurrently(fixture);
}

/// A record names the agent, the span and the backends of its registration.
pub fn the_record_describes_the_registration(fixture: &impl RegistrarFixture) {
    let (registrar, is_registered) = new(fixture);
    let memory = fixture.memory(&registrar);
    let span = Span::of(&memory);
    assert!(!is_registered(&span), "fresh memory is already registered");
    let registered = register(&registrar, memory);
    let record = registered.record();
    assert_eq!(record.agent, *registrar.agent(), "the record names another agent");
    assert_eq!(record.span, span, "the record has another span");
    assert!(record.accepted().next().is_some(), "no backend accepted, and the call succeeded");
    for (index, outcome) in record.backends.iter().enumerate() {
        let others = record.backends.iter().skip(index + 1);
        let again = others.filter(|other| other.backend == outcome.backend).count();
        assert_eq!(again, 0, "{} has two outcomes", outcome.backend);
    }
    assert!(is_registered(&span), "the span is not registered");
}

/// Registered memory has the properties of the inner memory, and its registration.
pub fn registered_memory_keeps_its_properties(fixture: &impl RegistrarFixture) {
    let registrar = fixture.registrar();
    let memory = fixture.memory(&registrar);
    let (span, alias) = (Span::of(&memory), memory.device_alias());
    let capabilities = memory.capabilities();
    let registered = register(&registrar, memory);
    assert_eq!(Span::of(&registered), span, "registering changed the span");
    assert_eq!(registered.device_alias(), alias, "registering changed the alias");
    assert_eq!(registered.capabilities(), capabilities, "registering changed the report");
    let mut seen = 0;
    registered.visit_registrations(&mut |record| {
        seen += u32::from(record.agent == *registrar.agent() && record.span == span);
    });
    assert_eq!(seen, 1, "the memory must show its registration once");
}

/// When the memory is released, its span is no longer registered.
pub fn dropping_deregisters_before_the_memory_is_released(fixture: &impl RegistrarFixture) {
    let registrar = fixture.registrar();
    let (witness, seen) = witness(fixture, &registrar);
    drop(register(&registrar, witness));
    seen.assert_deregistered_first();
}

/// `into_memory` ends the registration and returns the memory.
pub fn taking_the_memory_out_deregisters_it(fixture: &impl RegistrarFixture) {
    let (registrar, is_registered) = new(fixture);
    let memory = fixture.memory(&registrar);
    let span = Span::of(&memory);
    let memory = register(&registrar, memory).into_memory();
    assert_eq!(Span::of(&memory), span, "another memory was returned");
    assert!(!is_registered(&span), "the span is still registered");
    // It can be registered again.
    drop(register(&registrar, memory));
}

/// Memory of a kind that no backend accepts is returned, with an error that names the agent and the
/// kind.
pub fn refused_memory_is_returned_with_the_cause(fixture: &impl RegistrarFixture) {
    let registrar = fixture.registrar();
    let Some(region) = fixture.foreign() else { return };
    let failed = registrar.register(region.clone()).expect_err("memory that no backend accepts");
    assert!(failed.memory.same_memory(&region), "another memory was returned");
    match failed.cause {
        RegisterError::UnsupportedKind { agent, kind } => {
            assert_eq!(agent, *registrar.agent(), "the error names another agent");
            assert_eq!(kind, region.kind(), "the error names another kind");
        }
        other => panic!("{} memory was refused with: {other}", region.kind()),
    }
}

/// Dropping the registrar ends no registration. The remaining registrations end normally.
pub fn registrations_outlive_the_registrar(fixture: &impl RegistrarFixture) {
    let (registrar, is_registered) = new(fixture);
    let (witness, seen) = witness(fixture, &registrar);
    let registered = register(&registrar, witness);
    let span = Span::of(&registered);
    drop(registrar);
    assert!(is_registered(&span), "the registration ended with the registrar");
    drop(registered);
    seen.assert_deregistered_first();
}

/// A registration moves to another thread and ends there, even as the last of the agent.
pub fn registrations_end_on_any_thread(fixture: &impl RegistrarFixture) {
    let registrar = fixture.registrar();
    let (witness, seen) = witness(fixture, &registrar);
    let registered = register(&registrar, witness);
    thread::scope(|scope| {
        scope.spawn(move || drop(registered));
        scope.spawn(move || drop(registrar));
    });
    seen.assert_deregistered_first();
}

/// The last view of registered memory ends its registration, and no earlier one does.
pub fn views_keep_the_registration(fixture: &impl RegistrarFixture) {
    let (registrar, is_registered) = new(fixture);
    let (witness, seen) = witness(fixture, &registrar);
    let region = Region::new(register(&registrar, witness));
    let half = ByteCount::new(region.length().get() / 2);
    let view = region.view(half, half).expect("the second half");
    drop(region);
    assert!(is_registered(&view.span()), "the registration ended with the first view");
    let mut records = Vec::new();
    view.visit_registrations(&mut |record| records.push(record.clone()));
    let covered = records.iter().any(|record| record.span.covers(&view.span()));
    assert!(covered, "the view shows no registration that covers it: {records:?}");
    drop(view);
    seen.assert_deregistered_first();
}

/// Either of two registrations of the same bytes can end first; the other stays active.
pub fn two_registrations_of_one_span_do_not_end_each_other(fixture: &impl RegistrarFixture) {
    for in_order in [true, false] {
        let (registrar, is_registered) = new(fixture);
        let (witness, seen) = witness(fixture, &registrar);
        let region = Region::new(witness);
        let span = region.span();
        let first = register(&registrar, region.clone());
        let second = register(&registrar, region);
        let (dropped_first, remaining) = if in_order { (first, second) } else { (second, first) };
        drop(dropped_first);
        assert!(is_registered(&span), "one registration ended the other");
        drop(remaining);
        seen.assert_deregistered_first();
    }
}

/// A view of registered memory can be registered too. Its registration ends without ending that of
/// the whole, and stays active when that of the whole ends. It may use the registration of the
/// whole, and then keeps it.
pub fn a_registration_within_another_is_independent(fixture: &impl RegistrarFixture) {
    for part_goes_first in [true, false] {
        let (registrar, is_registered) = new(fixture);
        let (witness, seen) = witness(fixture, &registrar);
        let region = Region::new(witness);
        let length = ByteCount::new(region.length().get() / 2);
        let view = region.view(ByteCount::ZERO, length).expect("the first half");
        let (whole, part) = (register(&registrar, region), register(&registrar, view));
        let (all, half) = (Span::of(&whole), Span::of(&part));
        if part_goes_first {
            drop(part);
            assert!(is_registered(&all), "the part ended the whole");
            drop(whole);
        } else {
            drop(whole);
            assert!(is_registered(&half), "the whole ended the part");
            drop(part);
        }
        assert!(!is_registered(&half) && !is_registered(&all), "something is still registered");
        seen.assert_deregistered_first();
    }
}

/// Threads register their own memory and shared memory at the same time.
pub fn threads_register_concurrently(fixture: &impl RegistrarFixture) {
    let (registrar, is_registered) = new(fixture);
    let (witness, seen) = witness(fixture, &registrar);
    let shared = Region::new(witness);
    thread::scope(|scope| {
        for _ in 0..4 {
            let (registrar, shared, is_registered) = (&registrar, &shared, &is_registered);
            scope.spawn(move || {
                for _ in 0..16 {
                    let own = fixture.memory(registrar);
                    let span = Span::of(&own);
                    let own = register(registrar, own);
                    let also = register(registrar, shared.clone());
                    assert!(is_registered(&span), "a thread's own memory");
                    assert!(is_registered(&Span::of(&also)), "memory that all threads share");
                    drop(own.into_memory());
                    drop(also);
                }
            });
        }
    });
    assert!(!is_registered(&shared.span()), "a registration was leaked");
    drop(shared);
    seen.assert_deregistered_first();
}

fn new<F: RegistrarFixture>(fixture: &F) -> (F::Registrar, Probe) {
    let registrar = fixture.registrar();
    let probe = fixture.probe(&registrar);
    (registrar, probe)
}

#[track_caller]
fn register<M: Memory>(registrar: &impl Register, memory: M) -> Registered<M> {
    match registrar.register(memory) {
        Ok(registered) => registered,
        Err(failed) => panic!("{:?} was refused: {}", failed.memory, failed.cause),
    }
}

fn witness<F: RegistrarFixture>(
    fixture: &F,
    registrar: &F::Registrar,
) -> (Witness<F::Memory>, Seen) {
    let (memory, probe) = (fixture.memory(registrar), fixture.probe(registrar));
    let seen = Seen::default();
    (Witness { memory, probe, seen: seen.clone() }, seen)
}

/// Memory that records, when it is released, whether its span is registered.
struct Witness<M: Memory> {
    memory: M,
    probe: Probe,
    seen: Seen,
}

/// Whether the span was registered when the memory was released; `None` before.
#[derive(Clone, Debug, Default)]
struct Seen(Arc<Mutex<Option<bool>>>);

impl Seen {
    #[track_caller]
    fn assert_deregistered_first(&self) {
        match *lock(&self.0) {
            Some(registered) => assert!(!registered, "memory was released while it was registered"),
            None => panic!("memory was not released"),
        }
    }
}

impl<M: Memory> Drop for Witness<M> {
    fn drop(&mut self) {
        let registered = (self.probe)(&Span::of(&self.memory));
        *lock(&self.seen.0) = Some(registered);
    }
}

impl<M: Memory> fmt::Debug for Witness<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Witness").field(&self.memory).finish()
    }
}

// SAFETY: all methods delegate to the memory, which is neither moved nor dropped before `self`.
unsafe impl<M: Memory> Memory for Witness<M> {
    delegate_memory!(self, self.memory);
}
