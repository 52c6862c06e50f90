//! What this crate answers on a machine without a driver: a typed refusal, from every way in.
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
