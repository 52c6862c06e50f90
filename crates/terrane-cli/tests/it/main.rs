//! Runs the command as users run it.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test unwraps expected values, and prints when it is skipped"
)]

mod bench;
mod docs;
mod doctor;
mod gpu;
mod layout;
mod limits;
mod plan;
mod schemas;
mod snapshots;
mod store;
mod support;
mod top;
mod wrong_inputs;
