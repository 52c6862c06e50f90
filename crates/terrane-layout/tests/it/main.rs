//! Integration tests of the layout crate: what users see of it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    missing_docs,
    clippy::missing_errors_doc,
    reason = "a test says what it expects by unwrapping it, and what it skips"
)]

mod adopt;
mod allocate;
mod compile_fail;
mod doubles;
#[cfg(feature = "model-config")]
mod model;
#[cfg(feature = "model-config")]
mod model_groups;
#[cfg(feature = "model-config")]
mod model_hostile;
mod oracle;
mod physical;
mod storage;
