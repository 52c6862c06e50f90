//! The engine over the real library, with two agents of one process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

mod conformance;
mod support;
