//! The simulated driver behaves as the documentation of the driver states. The tests call its
//! exported functions, each with its own devices.
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
