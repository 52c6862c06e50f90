//! Tests that need a device. Each test declares its needs. If they are not met, it prints
//! `skipped: NAME: REASON`. Run them one at a time (`--test-threads=1`).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_errors_doc,
    reason = "a test fails by panicking"
)]

mod arguments;
mod arrays;
mod buffers;
mod device;
mod needs;
mod support;
