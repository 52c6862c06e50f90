//! Integration tests of whole arrays, columns and buffers.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_errors_doc,
    reason = "a test fails by panicking"
)]

mod arrays;
mod columns;
mod reentrant;
