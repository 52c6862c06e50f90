//! Registration of memory with an agent's backends.

mod descriptor;
mod table;

use std::sync::Arc;

use terrane_core::{
    AgentName, Alignment, BackendOutcome, Limits, Memory, Register, RegisterError, Registration,
    RegistrationRecord, Span,
};

pub(crate) use descriptor::Descriptor;
pub(crate) use table::Table;

use crate::agent::Backend;
use crate::backend::{Demand, FileAccess};
use crate::{Agent, Refusal};
use table::Held;

impl Register for Agent {
    fn agent(&self) -> &AgentName {
        self.name()
    }

    fn limits(&self) -> Limits {
        let direct = self.created().iter().any(|b| b.file_access == FileAccess::Direct);
        if direct {
            Limits { alignment: Alignment::PAGE, granule: Alignment::PAGE, ..Limits::NONE }
        } else {
            Limits::NONE
        }
    }

    unsafe fn register_span(&self, memory: &dyn Memory) -> Result<Registration, RegisterError> {
        let span = Span::of(memory);
        let mut held = Held::new(self);
        let mut outcomes = Vec::with_capacity(self.created().len());
        let mut asked = false;
        for backend in self.created() {
            let refusal = register_with(&mut held, backend, &span).err();
            asked |= !matches!(&refusal, Some(Refusal::MemoryType { .. } | Refusal::Kind { .. }));
            if let (Some(refusal), Demand::Required) = (&refusal, backend.demand) {
                return Err(RegisterError::RequiredBackend {
                    agent: self.name().clone(),
                    backend: backend.name.clone(),
                    source: Box::new(refusal.clone()),
                });
            }
            let refusal =
                refusal.map(|why| Arc::new(why) as Arc<dyn std::error::Error + Send + Sync>);
            outcomes.push(BackendOutcome { backend: backend.name.clone(), refusal });
        }
        let agent = self.name().clone();
        if outcomes.iter().any(|outcome| outcome.refusal.is_none()) {
            Ok(Registration::new(RegistrationRecord { agent, span, backends: outcomes }, held))
        } else if asked {
            Err(RegisterError::Refused { agent, span, backends: outcomes })
        } else {
            Err(RegisterError::UnsupportedKind { agent, kind: span.kind })
        }
    }
}

fn register_with(held: &mut Held, backend: &Backend, span: &Span) -> Result<(), Refusal> {
    let descriptor = Descriptor::of(span, backend.file_access)?;
    if !backend.memory.contains(&descriptor.memory) {
        return Err(Refusal::MemoryType { memory: descriptor.memory });
    }
    held.register(backend, descriptor)
}
