//! The store: verbs, tiers, faults and restarts.

mod combinations;
mod devices;
mod direct_gets;
mod disk_only;
mod faults;
mod harness;
mod hostile;
mod incomplete;
mod layers;
mod memory_tiers;
mod orphans;
mod panics;
mod prefixes;
mod quarantine;
mod random;
mod read_only;
mod reports;
mod resizes;
mod scrubs;
mod slower_tiers;
mod soak;
mod stripes;
