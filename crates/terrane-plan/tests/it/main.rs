//! Plans of published models and machines.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test unwraps expected values"
)]

mod expected;
mod plans;
