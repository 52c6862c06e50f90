//! Encoding, decoding and refusals.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    missing_docs,
    reason = "tests say what they expect by unwrapping it"
)]

mod allocations;
mod corpus;
mod differences;
mod frames;
mod golden;
mod hostile;
mod hostile_regions;
mod hostile_sizes;
mod layouts;
mod round_trips;
