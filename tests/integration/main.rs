//! The crates together, as a serving engine uses them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by unwrapping"
)]

mod adopted;
mod budgeted;
mod pooled;
mod support;
