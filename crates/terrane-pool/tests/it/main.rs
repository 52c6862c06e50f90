//! Pools from the outside: against a model, with threads, streams, faults and exhaustion.
#![cfg(not(loom))]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_errors_doc,
    reason = "a failed expectation panics"
)]

mod basics;
mod budgets;
mod compile_fail;
mod conformance;
mod failing_fences;
mod foreign;
mod guarded;
mod heap;
mod hits;
mod managed;
mod model;
mod reach;
mod reclaim;
mod slabs;
mod snapshots;
mod stacks;
mod staging;
mod streams;
mod support;
mod threads;
mod units;
