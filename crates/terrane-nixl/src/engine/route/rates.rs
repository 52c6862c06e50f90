//! The rate of each backend, in each direction.

use std::time::Duration;

use terrane_transfer::engines::Rate;

use super::{Operation, Route};
use crate::agent::Agent;

/// The rates of an agent's backends.
#[derive(Debug)]
pub(in crate::engine) struct Rates {
    by_backend: Box<[BackendRates]>,
    /// The rates for a backend that the agent does not have.
    unknown: BackendRates,
}

#[derive(Debug)]
struct BackendRates {
    read: Rate,
    write: Rate,
}

impl Rates {
    /// Estimates, which the first transfers replace. They were measured with UCX between two
    /// processes on a machine with two cores.
    pub(in crate::engine) fn new(agent: &Agent) -> Self {
        let guess = || Rate::new(4e9, Duration::from_micros(60), Duration::from_micros(2));
        let guesses = || BackendRates { read: guess(), write: guess() };
        let by_backend = agent.created_backends().iter().map(|_| guesses()).collect();
        Self { by_backend, unknown: guesses() }
    }

    pub(in crate::engine) fn of(&self, route: &Route) -> &Rate {
        let rates = self.by_backend.get(route.backend).unwrap_or(&self.unknown);
        match route.operation {
            Operation::Read => &rates.read,
            Operation::Write => &rates.write,
        }
    }
}
