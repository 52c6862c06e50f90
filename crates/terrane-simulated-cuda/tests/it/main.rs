//! The simulated driver does what the documentation of the driver says. The tests call its exported
//! functions, each with devices of its own.
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
