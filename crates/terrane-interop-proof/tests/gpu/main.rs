//! The plug-ins for engines in Rust over memory of a device, as an engine would pass it: pointers.
//!
//! Each test declares its needs. If they are not met, it prints `skipped: NAME: REASON`. Run them one
//! at a time (`--test-threads=1`).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_errors_doc,
    reason = "a test fails by panicking"
)]

#[path = "../../examples/host_tier/arenas.rs"]
mod arenas;
#[path = "../../examples/swap_blocks/block_copy.rs"]
#[allow(dead_code, reason = "only candle's tensors have some of the errors")]
mod block_copy;
#[path = "../../examples/host_tier/block_on.rs"]
mod block_on;
#[path = "../../examples/host_tier/contract.rs"]
mod contract;
#[path = "../../examples/host_tier/engine.rs"]
mod engine;
#[path = "../../../terrane-cuda/tests/gpu/needs.rs"]
#[allow(dead_code, reason = "the needs of other tests are there as well")]
mod needs;
#[path = "../it/rank.rs"]
#[allow(dead_code, reason = "some ranks have no device")]
mod rank;
#[path = "../../examples/host_tier/store_tier.rs"]
mod store_tier;

mod host_tier;
mod swap_blocks;
