//! The notification of transfers that wait for others to end.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::ticket::{Dependent, TransferId};
use crate::sync::per_thread;

/// Runs code that may call foreign code, and catches its panics. A guard or waker that panics must
/// not stop the engine or keep others from being notified.
pub(crate) fn catch_foreign_panic(run: impl FnOnce()) {
    if panics(run) {
        // A subscriber is foreign code, too.
        panics(|| {
            tracing::error!(
                "foreign code, such as a guard or a waker, panicked as a transfer ended"
            );
        });
    }
}

/// Whether the code panics. The drop of a panic's value may panic as well.
fn panics(run: impl FnOnce()) -> bool {
    let Err(value) = catch_unwind(AssertUnwindSafe(run)) else { return false };
    if let Err(another) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        // This value leaks, because its drop may panic with a third one.
        let _leaks = ManuallyDrop::new(another);
    }
    true
}

type Notification = (Arc<dyn Dependent>, TransferId, bool);

per_thread! {
    static PENDING: RefCell<VecDeque<Notification>> = const { RefCell::new(VecDeque::new()) };
    static IS_NOTIFYING: Cell<bool> = const { Cell::new(false) };
}

/// Notifies `dependents` of an end, in their order.
///
/// A notification may end a dependent in turn, because its predecessor failed, and so call this
/// function again. Chains can have any length, so a list replaces recursion.
pub(crate) fn notify(dependents: Vec<Arc<dyn Dependent>>, ended: TransferId, succeeded: bool) {
    let mut notices = dependents.into_iter().map(|dependent| (dependent, ended, succeeded));
    if PENDING.try_with(|list| list.borrow_mut().extend(&mut notices)).is_err() {
        // The thread is exiting and its list no longer exists, so this recurses.
        return notices.for_each(deliver);
    }
    if IS_NOTIFYING.with(|is_notifying| is_notifying.replace(true)) {
        return;
    }
    let _ends = EndsNotifying;
    notify_pending();
}

/// Ends the notifications of this thread when it drops, also in a panic.
struct EndsNotifying;

impl Drop for EndsNotifying {
    fn drop(&mut self) {
        IS_NOTIFYING.with(|is_notifying| is_notifying.set(false));
    }
}

/// Delivers the pending notifications of this thread's list.
///
/// Called before the thread sleeps for another transfer. A guard's drop may do that while a
/// dependent is notified. That transfer's notification may be later in the list.
pub(crate) fn notify_pending() {
    // If the thread is exiting, its list no longer exists.
    while let Ok(Some(notice)) = PENDING.try_with(|list| list.borrow_mut().pop_front()) {
        deliver(notice);
    }
}

fn deliver((dependent, ended, succeeded): Notification) {
    catch_foreign_panic(|| dependent.predecessor_ended(ended, succeeded));
    // It may own a waker.
    catch_foreign_panic(|| drop(dependent));
}
