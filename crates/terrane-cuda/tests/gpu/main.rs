//! Tests that need a device. Each test declares its needs. If they are not met, it prints `skipped:
//! NAME: REASON`. Run one test at a time (`--test-threads=1`), because some allocate all memory.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::missing_errors_doc,
    reason = "a test says what it expects by panicking, and what it measured by printing"
)]

mod background;
mod budgets;
mod captures;
mod debugging;
mod drivers;
mod engine;
mod exhaustion;
mod faults;
mod forks;
mod granted;
mod kernel_arguments;
mod kernels;
mod ladder;
mod lost;
mod managed;
mod memory;
mod needs;
mod neighbours;
mod nodes;
mod ordered;
mod pinned;
mod pools;
mod progress;
mod simulated;
mod size_classes;
mod staging;
mod streams;
mod unregistered;
mod usage;
