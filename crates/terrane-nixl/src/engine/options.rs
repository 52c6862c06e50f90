//! The options of a NIXL engine.

use std::num::NonZeroUsize;
use std::time::Duration;

use terrane_core::ByteCount;

/// The options of a [`NixlEngine`](crate::NixlEngine).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlEngineOptions {
    /// The longest time that a transfer may take after the engine starts it, unless it has an
    /// earlier [deadline](terrane_transfer::Transfer::deadline). `None` sets no limit: a transfer
    /// with a peer that hangs then never ends.
    pub deadline: Option<Duration>,
    /// The maximum number of bytes in one request. With direct I/O these are whole pages of 4 KiB,
    /// at least one. If a backend copies while it posts, this bounds the delay of a deadline, and
    /// how long other transfers wait for this one.
    pub request_bytes: ByteCount,
    /// The maximum number of descriptors in one request.
    pub request_descriptors: NonZeroUsize,
    /// The maximum number of requests of one transfer in flight.
    pub requests: NonZeroUsize,
    /// The maximum number of descriptors in a list that NIXL prepares, one for each piece of an
    /// end; 0 disables lists. Requests to peers whose pieces cannot be joined then name pieces by
    /// index.
    ///
    /// Preparing a list temporarily takes about 48 bytes for each descriptor, and delays other
    /// transfers in flight: two ends of 262,144 pieces take about 20 ms. NIXL keeps about 56 bytes
    /// for each stretch of evenly spaced pieces; a layout without gaps has one stretch in each
    /// region. A list is released when its endpoint has dropped and the engine is used with another
    /// endpoint.
    pub prepared_descriptors: usize,
    /// The number of descriptors that requests list before the engine prepares a list, as a
    /// multiple of the list's length. Each end counts its own. With 0, the engine prepares the
    /// lists for the first request.
    pub prepare_threshold: u32,
    /// The time for which the engine's thread polls without sleeping after a request has begun or
    /// ended. Some transports of UCX move bytes only while a thread polls. A network card continues
    /// by itself, so a short time suffices with it.
    pub busy_poll: Duration,
    /// The time for which a dropped engine waits for orphaned requests; `Duration::MAX` waits
    /// without a limit.
    pub drop_timeout: Duration,
}

impl Default for NixlEngineOptions {
    /// A deadline of two minutes. Requests of up to 128 MiB and 16,384 descriptors, 4 at a time.
    /// Lists of up to 1,048,576 descriptors, prepared after the same number was listed without
    /// them. Busy polling for 10 ms, and a drop timeout of 2 seconds.
    fn default() -> Self {
        Self {
            deadline: Some(Duration::from_secs(120)),
            request_bytes: ByteCount::mib(128),
            request_descriptors: const { NonZeroUsize::new(16_384).unwrap() },
            requests: const { NonZeroUsize::new(4).unwrap() },
            prepared_descriptors: 1 << 20,
            prepare_threshold: 1,
            busy_poll: Duration::from_millis(10),
            drop_timeout: Duration::from_secs(2),
        }
    }
}
