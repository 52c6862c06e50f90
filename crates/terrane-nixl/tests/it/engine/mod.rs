//! The copy engine over the real library.

mod conformance;
mod deaths;
mod drops;
mod files;
mod helping;
mod notifications;
mod panics;
mod peer_process;
mod processes;
mod refusals;
mod relays;
mod reports;
mod support;
