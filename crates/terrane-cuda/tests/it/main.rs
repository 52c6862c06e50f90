//! Without a driver, every entry point returns a typed error.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_errors_doc,
    reason = "a test says what it expects by panicking"
)]

mod refusals;
