//! Integration tests of the facade: its paths, and its example as a user runs it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    missing_docs,
    clippy::missing_errors_doc,
    reason = "a test says what it expects by unwrapping it, and what it skipped by printing"
)]

mod budgets;
mod offload;
mod offload_faults;
mod parity;
mod paths;
mod run;
mod store_example;
