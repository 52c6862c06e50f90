//! Registrars that break one rule each. The suite must detect every one of them.

use std::sync::{Arc, Mutex};

use terrane_core::{
    AgentName, Allocate, BackendOutcome, ByteCount, Limits, Memory, Region, RegionRequest,
    Register, RegisterError, Registration, RegistrationRecord, Span,
};
use terrane_testkit::conformance::registrar::{self, Probe};
use terrane_testkit::conformance::{RegistrarFixture, check_registrar};
use terrane_testkit::memory::{HeapAllocator, HeapMemory};

use crate::broken::detected;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    Nothing,
    ForgetsToDeregister,
    RegistersHalf,
    NamesAnother,
    EndsAllOfTheSpan,
    EndsAllWithin,
    EndsWithTheRegistrar,
    TakesEveryKind,
}

/// The registered spans.
type Spans = Arc<Mutex<Vec<Span>>>;

/// Registers like a correct registrar, with one error.
struct Broken(Wrong, AgentName, Spans);

/// Ends a registration, correctly or not.
struct Ends(Wrong, Span, Spans);

impl Drop for Ends {
    fn drop(&mut self) {
        let mut spans = self.2.lock().unwrap();
        match self.0 {
            Wrong::ForgetsToDeregister => {}
            Wrong::EndsAllOfTheSpan => spans.retain(|span| *span != self.1),
            Wrong::EndsAllWithin => spans.retain(|span| !self.1.covers(span)),
            _ => {
                if let Some(at) = spans.iter().position(|span| *span == self.1) {
                    spans.remove(at);
                }
            }
        }
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        if self.0 == Wrong::EndsWithTheRegistrar {
            self.2.lock().unwrap().clear();
        }
    }
}

impl Register for Broken {
    fn agent(&self) -> &AgentName {
        &self.1
    }

    fn limits(&self) -> Limits {
        Limits::NONE
    }

    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
        let (mut span, agent) = (Span::of(memory), self.1.clone());
        if !memory.kind().is_host() && self.0 != Wrong::TakesEveryKind {
            return Err(RegisterError::UnsupportedKind { agent, kind: memory.kind() });
        }
        if self.0 == Wrong::RegistersHalf {
            span.length = ByteCount::new(span.length.get() / 2);
        }
        let agent = if self.0 == Wrong::NamesAnother { "another".into() } else { agent };
        self.2.lock().unwrap().push(span);
        let backends = vec![BackendOutcome { backend: "B".into(), refusal: None }];
        let record = RegistrationRecord { agent, span: Span::of(memory), backends };
        Ok(Registration::new(record, Ends(self.0, span, Arc::clone(&self.2))))
    }
}

impl RegistrarFixture for Wrong {
    type Registrar = Broken;
    type Memory = HeapMemory;

    fn registrar(&self) -> Broken {
        Broken(*self, "agent".into(), Spans::default())
    }

    fn memory(&self, _: &Broken) -> HeapMemory {
        HeapAllocator::system().allocate(&RegionRequest::new(ByteCount::kib(8))).unwrap()
    }

    fn foreign(&self) -> Option<Region> {
        let request = RegionRequest::new(ByteCount::kib(8));
        Some(Region::new(HeapAllocator::simulated_device(0).allocate(&request).unwrap()))
    }

    fn probe(&self, registrar: &Broken) -> Probe {
        let spans = Arc::clone(&registrar.2);
        Arc::new(move |span| spans.lock().unwrap().iter().any(|other| other.covers(span)))
    }
}

#[test]
fn registrars_that_break_a_rule_are_detected() {
    check_registrar(&Wrong::Nothing);
    let forgets = Wrong::ForgetsToDeregister;
    detected(|| registrar::dropping_deregisters_before_the_memory_is_released(&forgets));
    detected(|| registrar::taking_the_memory_out_deregisters_it(&forgets));
    detected(|| registrar::views_keep_the_registration(&forgets));
    detected(|| registrar::threads_register_concurrently(&forgets));
    detected(|| registrar::the_record_describes_the_registration(&Wrong::RegistersHalf));
    detected(|| registrar::the_record_describes_the_registration(&Wrong::NamesAnother));
    detected(|| registrar::registered_memory_keeps_its_properties(&Wrong::NamesAnother));
    let ends_both = Wrong::EndsAllOfTheSpan;
    detected(|| registrar::two_registrations_of_one_span_do_not_end_each_other(&ends_both));
    let ends_parts = Wrong::EndsAllWithin;
    detected(|| registrar::a_registration_within_another_is_independent(&ends_parts));
    detected(|| registrar::registrations_outlive_the_registrar(&Wrong::EndsWithTheRegistrar));
    detected(|| registrar::refused_memory_is_returned_with_the_cause(&Wrong::TakesEveryKind));
}
