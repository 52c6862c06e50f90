//! Integration tests of the layout crate.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    missing_docs,
    clippy::missing_errors_doc,
    reason = "a test fails by unwrapping, and prints what it skips"
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
#[cfg(feature = "model-config")]
mod model_widths;
mod oracle;
mod physical;
mod storage;
