//! The real library, with its UCX and POSIX plugins: what it does, and how each thing that it cannot
//! do is answered.
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
#[allow(dead_code, reason = "what the tests of a device ask as well is there, too")]
mod reasons;
mod registration;
mod support;
