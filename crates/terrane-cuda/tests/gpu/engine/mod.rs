//! The copy engine: every path over every kind of memory, and what can go wrong.

mod adopted;
mod background_memory;
mod calls;
mod captures;
mod checksum_faults;
mod checksum_limits;
mod checksums;
mod faults;
pub mod fixture;
mod held;
mod orders;
mod orphans;
mod panics;
mod paths;
mod peers;
mod ranks;
mod references;
mod relays;
mod resources;
mod sections;
mod submits;
mod switching;
mod unknown;
mod wakers;
mod without_kernels;
