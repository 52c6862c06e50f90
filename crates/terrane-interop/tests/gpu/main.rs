//! What needs a device. Each test declares its needs; where they are not met, it says
//! `skipped: NAME: REASON`. Run one at a time (`--test-threads=1`).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_errors_doc,
    reason = "a test says what it expects by panicking"
)]

mod device;
mod needs;
mod streams;
