//! Calls of the bindings under a lock.

use tracing::dispatcher::get_default;
use tracing::subscriber::{NoSubscriber, with_default};

/// Calls the bindings under a lock of this crate.
///
/// The bindings trace each call. A subscriber is foreign code, which may use the agent whose lock
/// this thread holds. So this function disables the subscriber on this thread during the call.
pub(crate) fn without_tracing<T>(call: impl FnOnce() -> T) -> T {
    // Inside a subscriber, trace events are not delivered, and another subscriber cannot be set.
    if get_default(|subscriber| subscriber.is::<NoSubscriber>()) {
        return call();
    }
    with_default(NoSubscriber::default(), call)
}
