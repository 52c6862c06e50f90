//! Integration tests of whole tensors and layouts.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_errors_doc,
    reason = "a test fails by panicking"
)]

mod exports;
mod hostile;
mod kv;
mod kv_changed;
mod peer;
mod reentrant;
mod round_trips;
mod strided;
