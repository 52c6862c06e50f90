//! What `terrane-wire` writes, and what it reads and refuses.

mod golden;
mod layouts;
mod round_trips;
