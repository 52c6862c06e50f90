//! The integration tests of terrane-storage.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    missing_docs,
    clippy::missing_errors_doc,
    reason = "a panic here is a failed test"
)]

mod conformance;
mod disk;
mod disk_faults;
mod queue;
mod queue_faults;
mod queue_model;
mod registered;
mod support;
mod system;
mod system_limits;
