//! Integration tests of the facade: its paths, and its examples as a user runs them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    missing_docs,
    clippy::missing_errors_doc,
    reason = "a test unwraps the results that it expects, and prints why it is skipped"
)]

mod budgets;
mod offload;
mod offload_faults;
mod parity;
mod paths;
mod run;
mod store_example;
