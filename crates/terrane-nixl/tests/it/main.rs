//! Tests with the real library and its UCX and POSIX plugins: functions and errors.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test says what it expects by panicking"
)]

mod agents;
mod backends;
mod cufile;
mod engine;
mod exits;
mod leaks;
mod peers;
mod probing;
mod processes;
#[path = "../common/cufile.rs"]
#[allow(dead_code, reason = "the tests of a device use the rest")]
mod reasons;
mod registration;
mod support;
