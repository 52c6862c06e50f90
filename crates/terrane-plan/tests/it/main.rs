//! Plans of published models and machines.

mod expected;
mod plans;
