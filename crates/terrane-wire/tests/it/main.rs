//! What `terrane-wire` writes, and what it reads and refuses.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    missing_docs,
    reason = "tests say what they expect by unwrapping it"
)]

mod golden;
mod layouts;
mod round_trips;
