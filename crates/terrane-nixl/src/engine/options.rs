//! What can be chosen of a NIXL engine.

use std::num::NonZeroUsize;
use std::time::Duration;

use terrane_core::ByteCount;

/// The options of a [`NixlEngine`](crate::NixlEngine).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlEngineOptions {
    /// How long a transfer may take, from when the engine takes it up, that states no earlier
    /// [deadline](terrane_transfer::Transfer::deadline); `None` for as long as it takes, which is for
    /// ever if a peer hangs.
    pub deadline: Option<Duration>,
    /// How many bytes one request has at most; whole pages of 4 KiB, and one at least, with a backend
    /// that goes around the page cache. Bounds how late a deadline is noticed, and for how
    /// long other transfers wait for this one, where a backend copies as it posts.
    pub request_bytes: ByteCount,
    /// How many descriptors one request has at most.
    pub request_descriptors: NonZeroUsize,
    /// How many requests of one transfer are in flight at a time.
    pub requests: NonZeroUsize,
    /// For how long after a request has begun or ended the engine's thread looks after the others
    /// without a rest. Some transports of UCX move bytes only while somebody looks; a network card
    /// goes on by itself, and with it little is enough.
    pub attention: Duration,
    /// How long the engine, when it drops, waits for requests that were given up;
    /// `Duration::MAX` for as long as it takes.
    pub farewell: Duration,
}

impl Default for NixlEngineOptions {
    /// A deadline of two minutes, requests of up to 32 MiB and 4096 descriptors, 4 at a time, an
    /// attention of 10 ms, and a farewell of 2 seconds.
    fn default() -> Self {
        Self {
            deadline: Some(Duration::from_secs(120)),
            request_bytes: ByteCount::mib(32),
            request_descriptors: const { NonZeroUsize::new(4096).unwrap() },
            requests: const { NonZeroUsize::new(4).unwrap() },
            attention: Duration::from_millis(10),
            farewell: Duration::from_secs(2),
        }
    }
}
