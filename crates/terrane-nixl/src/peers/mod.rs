//! Layouts that one agent exports and others import.
//!
//! An export consists of bytes: the layout's geometry, the location of its regions, and the
//! metadata by which NIXL reaches them. The two processes send it over any channel. The importer
//! gets a [`RemoteLayout`](remote::RemoteLayout), which is an end of transfers.

mod claims;
mod ending;
pub(crate) mod error;
mod export;
pub(crate) mod foreign;
pub(crate) mod forget;
mod import;
mod lease;
mod loaded;
pub(crate) mod metadata;
pub(crate) mod notifications;
mod overlap;
mod peer;
pub(crate) mod peer_use;
pub(crate) mod remote;
pub(crate) mod spaces;
pub(crate) mod table;
#[cfg(test)]
mod tests;
