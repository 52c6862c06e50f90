//! Calls of the bindings under a lock.

use tracing::dispatcher::get_default;
use tracing::subscriber::{NoSubscriber, with_default};

/// Calls the bindings under a lock of this crate's.
///
/// The bindings trace each call. A subscriber is foreign code, which may use the very agent whose lock
/// is held, so it is taken off this thread meanwhile.
pub(crate) fn quietly<T>(call: impl FnOnce() -> T) -> T {
    // Within a subscriber nothing that is traced arrives, and another cannot be set.
    if get_default(|subscriber| subscriber.is::<NoSubscriber>()) {
        return call();
    }
    with_default(NoSubscriber::default(), call)
}
