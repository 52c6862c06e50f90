//! Transfers as users see them, over simulated devices and engines.
#![cfg(not(loom))]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    missing_docs,
    reason = "tests say what they expect by unwrapping it, and what they skip"
)]

mod allocations;
mod cancels;
#[cfg(feature = "checksum")]
mod checksums;
mod compile_fail;
mod completion;
mod disk_faults;
mod disk_paths;
mod engines;
mod failures;
mod foreign;
mod forks;
mod formats;
mod group_proofs;
mod groups;
mod hazards;
mod heads;
mod incomplete;
mod layers;
mod limits;
mod metrics;
mod model;
mod orders;
mod overlaps;
mod ownership;
mod peers;
mod plans;
mod queues;
mod references;
mod refusals;
mod registered;
mod relayed_model;
mod relays;
mod sections;
mod sets;
mod slots;
mod support;
mod tickets;
mod waiter_progress;
