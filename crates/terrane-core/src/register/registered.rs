//! Memory together with its registration.

use std::any::Any;

use crate::bytes::byte_count::ByteCount;
use crate::capability::CapabilityReport;
use crate::location::storage_kind::StorageKind;
use crate::location::{DeviceAddress, Location};
use crate::memory::Memory;
use crate::register::registration::{Registration, RegistrationRecord};
use crate::register::{Register, RegisterError};

/// Memory that stays registered while this value lives.
///
/// The registration always ends before the memory is freed. There is no mutable access to the
/// memory, so safe code cannot replace it while its registration is in force.
#[derive(Debug)]
pub struct Registered<M> {
    // Fields drop in this order.
    registration: Registration,
    memory: M,
}

impl<M: Memory> Registered<M> {
    /// Registers `memory` with `registrar`.
    ///
    /// # Errors
    ///
    /// [`RegistrationFailed`] with the memory and the cause.
    pub fn new(registrar: &dyn Register, memory: M) -> Result<Self, RegistrationFailed<M>>
    where
        M: Sized,
    {
        // SAFETY: this value owns the registration and the memory. The registration drops first, by
        // the order of the fields and in `into_memory`.
        match unsafe { registrar.register_span(&memory) } {
            Ok(registration) => Ok(Self { registration, memory }),
            Err(cause) => Err(RegistrationFailed { memory, cause }),
        }
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The record: the agent, the span and the result of each backend.
    #[must_use]
    pub fn record(&self) -> &RegistrationRecord {
        self.registration.record()
    }

    /// Deregisters, and returns the memory.
    #[must_use]
    pub fn into_memory(self) -> M {
        let Self { registration, memory } = self;
        drop(registration);
        memory
    }
}

// SAFETY: every method returns the memory's value. The memory lives as long as this value. A move
// of this value does not move the bytes.
unsafe impl<M: Memory> Memory for Registered<M> {
    fn kind(&self) -> StorageKind {
        self.memory.kind()
    }

    fn location(&self) -> Location {
        self.memory.location()
    }

    fn length(&self) -> ByteCount {
        self.memory.length()
    }

    fn device_alias(&self) -> Option<DeviceAddress> {
        self.memory.device_alias()
    }

    fn copyable_from(&self, offset: ByteCount) -> Option<ByteCount> {
        self.memory.copyable_from(offset)
    }

    fn capabilities(&self) -> CapabilityReport {
        self.memory.capabilities()
    }

    fn visit_registrations(&self, visit: &mut dyn FnMut(&RegistrationRecord)) {
        visit(self.record());
        self.memory.visit_registrations(visit);
    }

    fn managed_block(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.memory.managed_block()
    }
}

/// A failed registration: the unchanged memory and the cause.
#[derive(Debug)]
pub struct RegistrationFailed<M> {
    /// The memory, unchanged.
    pub memory: M,
    /// Why it could not be registered.
    pub cause: RegisterError,
}

crate::delegate_error!(RegistrationFailed<M>, into RegisterError);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocate::limits::Limits;
    use crate::memory::span::Span;
    use crate::register::names::AgentName;
    use std::sync::{Arc, Mutex};

    type Journal = Arc<Mutex<Vec<&'static str>>>;

    #[derive(Debug)]
    struct Entry(Journal, &'static str);

    impl Drop for Entry {
        fn drop(&mut self) {
            self.0.lock().unwrap().push(self.1);
        }
    }

    #[derive(Debug)]
    struct Empty(#[expect(dead_code, reason = "held for its drop")] Entry);

    // SAFETY: a span of no bytes.
    unsafe impl Memory for Empty {
        fn kind(&self) -> StorageKind {
            StorageKind::System
        }
        fn location(&self) -> Location {
            Location::Host(crate::HostAddress::new(std::ptr::NonNull::<u8>::dangling()))
        }
        fn length(&self) -> ByteCount {
            ByteCount::ZERO
        }
    }

    struct Registrar(AgentName, Journal, bool);

    impl Register for Registrar {
        fn agent(&self) -> &AgentName {
            &self.0
        }
        fn limits(&self) -> Limits {
            Limits::NONE
        }
        unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
            if !self.2 {
                let (agent, kind) = (self.0.clone(), memory.kind());
                return Err(RegisterError::UnsupportedKind { agent, kind });
            }
            let (agent, span) = (self.0.clone(), Span::of(memory));
            let record = RegistrationRecord { agent, span, backends: Vec::new() };
            Ok(Registration::new(record, Entry(Arc::clone(&self.1), "deregister")))
        }
    }

    fn parts(accepts: bool) -> (Registrar, Empty, Journal) {
        let journal = Journal::default();
        let registrar = Registrar("a".into(), Arc::clone(&journal), accepts);
        let memory = Empty(Entry(Arc::clone(&journal), "release"));
        (registrar, memory, journal)
    }

    #[test]
    fn dropping_deregisters_first_and_releases_after() {
        let (registrar, memory, journal) = parts(true);
        drop(registrar.register(memory).unwrap());
        assert_eq!(*journal.lock().unwrap(), ["deregister", "release"]);
    }

    #[test]
    fn taking_the_memory_out_deregisters_it() {
        let (registrar, memory, journal) = parts(true);
        let memory = registrar.register(memory).unwrap().into_memory();
        assert_eq!(*journal.lock().unwrap(), ["deregister"]);
        drop(memory);
        assert_eq!(*journal.lock().unwrap(), ["deregister", "release"]);
    }

    #[test]
    fn a_failure_returns_the_memory_and_the_cause() {
        let (registrar, memory, journal) = parts(false);
        let failed = registrar.register(memory).unwrap_err();
        assert!(matches!(failed.cause, RegisterError::UnsupportedKind { .. }));
        assert!(journal.lock().unwrap().is_empty());
        drop(failed.memory);
        assert_eq!(*journal.lock().unwrap(), ["release"]);
    }

    #[test]
    fn nested_registrations_are_all_visible() {
        let (registrar, memory, _) = parts(true);
        let twice = registrar.register(registrar.register(memory).unwrap()).unwrap();
        let mut count = 0;
        twice.visit_registrations(&mut |_| count += 1);
        assert_eq!(count, 2);
    }
}
