//! The testkit's own backends pass its own suites, and backends that break a rule do not.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "a test fails by unwrapping"
)]

mod broken;
mod broken_registrars;
mod conformance;
mod engine;
mod pattern;
