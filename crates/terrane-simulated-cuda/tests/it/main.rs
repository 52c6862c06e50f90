//! What the documentation of the driver says, of the simulated one: through the functions that it
//! exports, each test with devices of its own.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects by panicking"
)]

mod captures;
mod copies;
mod faults;
mod kernels;
mod memory;
mod order;
mod support;
