//! The copy engine over the real library.

mod conformance;
mod deaths;
mod drops;
mod files;
mod foreign;
mod forks;
mod helping;
mod notifications;
mod panics;
mod peer_process;
mod processes;
mod python;
mod refusals;
mod relays;
mod reports;
mod support;
