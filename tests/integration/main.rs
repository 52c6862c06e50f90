//! The crates together, as a serving engine uses them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests say what they expect by unwrapping it"
)]

mod adopted;
mod budgeted;
mod pooled;
mod support;
