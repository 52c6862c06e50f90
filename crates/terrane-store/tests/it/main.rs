//! The integration tests of terrane-store.

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

mod disk;
mod eviction;
mod golden;
mod index;
mod queue;
mod store;
