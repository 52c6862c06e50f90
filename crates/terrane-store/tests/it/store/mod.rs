//! The store: verbs, tiers, faults and restarts.

mod disk_only;
mod harness;
mod memory_tiers;
mod random;
