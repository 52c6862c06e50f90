//! The store: verbs, tiers, faults and restarts.

mod disk_only;
mod harness;
