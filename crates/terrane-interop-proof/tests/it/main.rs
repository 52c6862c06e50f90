//! The plug-ins for engines in Rust, as the examples have them: `swap_blocks` over candle's tensors
//! on the CPU, and pegainfer's host tier over arenas in host memory.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_errors_doc,
    reason = "a test fails by panicking"
)]

#[path = "../../examples/host_tier/arenas.rs"]
mod arenas;
#[path = "../../examples/swap_blocks/block_copy.rs"]
mod block_copy;
#[path = "../../examples/host_tier/block_on.rs"]
mod block_on;
#[path = "../../examples/swap_blocks/candle.rs"]
mod candle;
#[path = "../../examples/host_tier/contract.rs"]
mod contract;
#[path = "../../examples/host_tier/engine.rs"]
mod engine;
#[path = "../../examples/host_tier/store_tier.rs"]
mod store_tier;
#[path = "../../examples/swap_blocks/swap_space.rs"]
mod swap_space;

mod host_tier;
mod host_tier_arenas;
mod host_tier_drops;
mod rank;
mod swap_blocks;
mod swap_refusals;
mod tensors;
