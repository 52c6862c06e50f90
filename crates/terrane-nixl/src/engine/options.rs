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
    /// Of how many descriptors NIXL prepares a list at most, one for each piece of an end, from which
    /// requests to peers whose pieces cannot be joined are made by index; 0 for no lists. Preparing one
    /// takes about 48 bytes for each meanwhile, and holds up what else is in flight: two ends of 262,144
    /// pieces take about 20 ms. What NIXL keeps is some 56 bytes for each stretch of evenly spaced
    /// pieces, of which a layout without gaps has one in each region. It is kept until the engine meets
    /// another endpoint after this one has gone.
    pub prepared_descriptors: usize,
    /// When such a list is prepared: once so many times as many descriptors have been listed anew as it
    /// has, at both ends; 0 for the first request.
    pub prepare_after: u32,
    /// For how long after a request has begun or ended the engine's thread looks after the others
    /// without a rest. Some transports of UCX move bytes only while somebody looks; a network card
    /// goes on by itself, and with it little is enough.
    pub attention: Duration,
    /// How long the engine, when it drops, waits for requests that were given up;
    /// `Duration::MAX` for as long as it takes.
    pub farewell: Duration,
}

impl Default for NixlEngineOptions {
    /// A deadline of two minutes; requests of up to 128 MiB and 16,384 descriptors, 4 at a time; lists of
    /// up to 1,048,576 descriptors, prepared once as many have been listed anew; an attention of 10 ms,
    /// and a farewell of 2 seconds.
    fn default() -> Self {
        Self {
            deadline: Some(Duration::from_secs(120)),
            request_bytes: ByteCount::mib(128),
            request_descriptors: const { NonZeroUsize::new(16_384).unwrap() },
            requests: const { NonZeroUsize::new(4).unwrap() },
            prepared_descriptors: 1 << 20,
            prepare_after: 1,
            attention: Duration::from_millis(10),
            farewell: Duration::from_secs(2),
        }
    }
}
