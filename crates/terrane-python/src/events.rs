//! Changes of a store's content.

use std::os::fd::{AsFd, AsRawFd};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use terrane_store::{Events as NativeEvents, KeyName, StoreEventKind};

/// The changes of a store since `Store.events` was called.
#[pyclass(frozen, module = "terrane_kv")]
pub(crate) struct Events {
    events: NativeEvents,
}

impl Events {
    pub(crate) fn new(events: NativeEvents) -> Self {
        Self { events }
    }
}

fn name(kind: StoreEventKind) -> &'static str {
    match kind {
        StoreEventKind::Stored => "stored",
        StoreEventKind::Evicted => "evicted",
        StoreEventKind::Removed => "removed",
        StoreEventKind::Corrupt => "corrupt",
        StoreEventKind::Cleared => "cleared",
        StoreEventKind::TierReadOnly => "tier_read_only",
        _ => "other",
    }
}

#[pymethods]
impl Events {
    /// Returns all events, the oldest first, as pairs of kind and key. The kinds are "stored", "evicted", "removed",
    /// "corrupt", "cleared" and "tier_read_only". The key is None if the event has no key, or if the store was opened
    /// without `keep_keys`.
    fn drain<'py>(&self, py: Python<'py>) -> Vec<(&'static str, Option<Bound<'py, PyBytes>>)> {
        let mut taken = Vec::new();
        self.events.take_all(&mut taken);
        let key = |key: Option<KeyName>| match key {
            Some(KeyName::Bytes(bytes)) => Some(PyBytes::new(py, &bytes)),
            _ => None,
        };
        taken.into_iter().map(|event| (name(event.kind), key(event.key))).collect()
    }

    /// The number of events that were dropped because they were not drained in time.
    #[getter]
    fn lost(&self) -> u64 {
        self.events.lost()
    }

    /// A descriptor that is readable while there are events.
    fn fileno(&self) -> i32 {
        self.events.as_fd().as_raw_fd()
    }
}
