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
    /// The most bytes in one request. A backend that bypasses the page cache takes whole pages of 4
    /// KiB, at least one. Where a backend copies while it posts, this bounds how late a deadline is
    /// noticed, and how long other transfers wait for this one.
    pub request_bytes: ByteCount,
    /// The most descriptors in one request.
    pub request_descriptors: NonZeroUsize,
    /// The most requests of one transfer in flight at a time.
    pub requests: NonZeroUsize,
    /// The most descriptors in a list that NIXL prepares, one for each piece of an end; 0 disables
    /// lists. Requests to peers whose pieces cannot be joined then name pieces by index.
    ///
    /// Preparing a list takes about 48 bytes for each descriptor temporarily, and delays other
    /// transfers in flight: two ends of 262,144 pieces take about 20 ms. NIXL keeps some 56 bytes
    /// for each stretch of evenly spaced pieces; a layout without gaps has one stretch in each
    /// region. The list is kept until its endpoint has dropped and the engine meets another one.
    pub prepared_descriptors: usize,
    /// When such a list is prepared: once the descriptors listed without it, at both ends, reach
    /// this multiple of its length. 0 prepares it for the first request.
    pub prepare_threshold: u32,
    /// How long the engine's thread polls without sleeping after a request has begun or ended. Some
    /// transports of UCX move bytes only while a thread polls. A network card continues by itself,
    /// so a short time is enough with it.
    pub busy_poll: Duration,
    /// How long a dropped engine waits for orphaned requests; `Duration::MAX` waits
    /// without a limit.
    pub drop_timeout: Duration,
}

impl Default for NixlEngineOptions {
    /// A deadline of two minutes. Requests of up to 128 MiB and 16,384 descriptors, 4 at a time.
    /// Lists of up to 1,048,576 descriptors, prepared once as many were listed without them. Busy
    /// polling for 10 ms, and a drop timeout of 2 seconds.
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
