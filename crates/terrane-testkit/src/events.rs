//! Runs a test's function at events of `tracing`.

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A subscriber that calls a function at each event, on the thread of the event. A test can inspect
/// an intermediate state there, or run foreign code at that point.
pub struct AtEvents<F> {
    target: &'static str,
    run: F,
}

impl<F: Fn(&Event<'_>) + Send + Sync + 'static> AtEvents<F> {
    /// Calls `run` at every event.
    pub const fn any(run: F) -> Self {
        Self::of("", run)
    }

    /// Calls `run` at events whose target has this prefix: those of a module, and of its
    /// submodules.
    pub const fn of(target: &'static str, run: F) -> Self {
        Self { target, run }
    }
}

impl<F: Fn(&Event<'_>) + Send + Sync + 'static> Subscriber for AtEvents<F> {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with(self.target)
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        (self.run)(event);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

impl<F> std::fmt::Debug for AtEvents<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AtEvents").field("target", &self.target).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn only_events_of_the_target_are_received() {
        let heard = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&heard);
        let at = AtEvents::of("here", move |_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        tracing::subscriber::with_default(at, || {
            tracing::info!(target: "here", "heard");
            tracing::info!(target: "here::within", "received as well");
            tracing::info!(target: "there", "not heard");
        });
        assert_eq!(heard.load(Ordering::Relaxed), 2);
    }
}
