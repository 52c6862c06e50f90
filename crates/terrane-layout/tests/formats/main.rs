//! The engines' formats against an independent oracle, and the proof against brute force.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    missing_docs,
    clippy::missing_panics_doc,
    reason = "a test fails by unwrapping, and prints what it skips"
)]

mod nested;
mod one_outer;
mod oracle;
mod pairs;
mod picture;
mod pieces;
mod refused;
