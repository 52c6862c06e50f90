//! The copy engine: every path over every kind of memory, and what can go wrong.

mod calls;
mod faults;
mod fixture;
mod held;
mod orders;
mod paths;
mod relays;
mod rising;
