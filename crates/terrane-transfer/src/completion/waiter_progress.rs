//! Lets a thread that waits for a transfer poll the engine, or copy for it, before it sleeps.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::engine::threads;
use crate::hazard::notify::notify_pending;
use crate::sync::{Countdown, spin_loop, yield_now};

/// Lets a thread that waits for a transfer poll the engine before it sleeps.
///
/// Waking a thread takes tens of microseconds, as long as a small transfer. So a waiting thread
/// calls [`poll`](Self::poll) for a while before it sleeps. A thread that only checks for the end
/// calls it once.
///
/// An engine must also detect every end by itself, because there may be no waiting thread.
pub trait WaiterProgress: Send + Sync {
    /// Checks once whether work of the engine has ended. If so, it signals
    /// [layers](crate::LayerSignals) and [finishes](crate::CopyJob::finish) jobs, including those
    /// that other threads wait for.
    ///
    /// Callers' threads call this often, several at once, and recursively: finishing a job may run
    /// code that polls another. So a call must take about a microsecond and must not block. If
    /// another thread is inside, the call must return at once. The engine must hold no lock that
    /// it needs to accept a job.
    fn poll(&self);

    /// Like [`poll`](Self::poll), for a thread that has blocked until the end, without a deadline.
    /// An engine whose library copies on the calling thread may copy the next piece here, however
    /// long that takes. All other rules of `poll` apply: if another thread is inside, the call
    /// returns.
    ///
    /// Returns whether it has copied a piece. If so, the thread polls for another
    /// [spin](DEFAULT_SPIN) time before it sleeps.
    fn poll_blocking(&self) -> bool {
        self.poll();
        false
    }

    /// The time range in which the end is expected, if the engine knows it. A thread queries it
    /// before it sleeps. The thread wakes at the start of the range, and polls until its end. It
    /// queries again after another [invitation](crate::CopyJob::invite_waiters), and after a
    /// [piece](Self::poll_blocking) that it has copied.
    fn expected_end(&self) -> Option<Range<Instant>> {
        None
    }
}

/// The time for which a waiting thread polls before it sleeps, unless its manager
/// [sets](crate::TransferManager::with_spin) another time.
///
/// It is longer than waking a thread, and longer than a transfer of some MiB between a device and
/// the host. It is short beside transfers of milliseconds.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(200);

/// The time for which a polling thread does not yield. After that it yields between polls. Other
/// threads may then delay the detection of an end.
const SPIN_ONLY: Duration = Duration::from_micros(50);

/// The latest invitation to poll an engine for a transfer. The engine owns the value that is
/// polled, which may own the job in turn.
#[derive(Clone)]
pub(crate) struct Invitation {
    progress: Weak<dyn WaiterProgress>,
    /// The number of earlier invitations.
    number: u64,
}

impl Invitation {
    /// Creates the invitation that replaces `former`. Both may refer to the same value.
    pub(crate) fn new(progress: &Arc<dyn WaiterProgress>, former: Option<&Self>) -> Self {
        let number = former.map_or(0, |former| former.number.wrapping_add(1));
        Self { progress: Arc::downgrade(progress), number }
    }
}

/// Polls once. The caller holds no lock, because the job may end during the poll.
pub(crate) fn poll(invitation: &Invitation) {
    call_engine(invitation, |progress| progress.poll());
}

/// Calls the engine, if its value still exists.
///
/// Values that drop during the call must not join threads: the caller only checks whether a
/// transfer has ended.
fn call_engine<T>(
    invitation: &Invitation,
    call: impl FnOnce(&dyn WaiterProgress) -> T,
) -> Option<T> {
    let mut answer = None;
    threads::finishing(|| answer = invitation.progress.upgrade().map(|progress| call(&*progress)));
    answer
}

/// The schedule of a waiting thread's polls. The thread polls for a while after each invitation. If
/// the engine knows when the end is expected, the thread also polls around that time.
pub(crate) struct WaiterPolling {
    spin: Duration,
    /// The number of the latest invitation that the thread has seen.
    seen_invitation: Option<u64>,
    /// The remaining spin time.
    remaining: Countdown,
    /// The remaining time in which the thread does not yield.
    spin_only: Countdown,
    /// The time of the thread's last clock query: one query per poll.
    now: Option<Instant>,
    polls: bool,
    /// Whether the thread yields before the next poll.
    yields: bool,
    /// Whether the engine may use the thread to copy a piece.
    may_block: bool,
    expected: ExpectedEnd,
}

/// The expected end, as far as the thread knows it.
enum ExpectedEnd {
    /// The engine has not been queried.
    NotAsked,
    /// The thread may sleep, and then polls from the start to the end of this range.
    At(Range<Instant>),
    /// The thread sleeps until it is woken.
    Nothing,
}

impl ExpectedEnd {
    fn of(spin: Duration) -> Self {
        let never = cfg!(loom) || spin.is_zero();
        if never { Self::Nothing } else { Self::NotAsked }
    }
}

impl WaiterPolling {
    /// Begins a wait with a deadline. The caller holds no lock, because this delivers the pending
    /// notifications of this thread.
    pub(crate) fn new(spin: Duration) -> Self {
        notify_pending();
        Self {
            spin,
            seen_invitation: None,
            remaining: Countdown::new(spin),
            spin_only: Countdown::new(SPIN_ONLY),
            now: None,
            polls: false,
            yields: false,
            may_block: false,
            expected: ExpectedEnd::of(spin),
        }
    }

    /// Begins a wait without a deadline.
    pub(crate) fn blocking(spin: Duration) -> Self {
        Self { may_block: true, ..Self::new(spin) }
    }

    /// Polls once. If the last poll found nothing, the thread yields first, because the transfer
    /// may need other threads to run. The last poll queries the expected end. The caller holds no
    /// lock.
    pub(crate) fn poll(&mut self, invitation: &Invitation) {
        if self.polls {
            if std::mem::replace(&mut self.yields, true) {
                // The thread does not yield after the poll that ends the transfer.
                if self.spin_only.has_time_left(self.now.unwrap_or_else(Instant::now)) {
                    spin_loop();
                } else {
                    yield_now();
                }
            }
            let has_done = if self.may_block {
                call_engine(invitation, |progress| progress.poll_blocking()) == Some(true)
            } else {
                poll(invitation);
                false
            };
            notify_pending();
            if has_done {
                self.restart();
            }
            return;
        }
        let due = call_engine(invitation, |progress| progress.expected_end()).flatten();
        self.expected = due.map_or(ExpectedEnd::Nothing, ExpectedEnd::At);
    }

    /// Whether the thread should call [`poll`](Self::poll) before it sleeps.
    pub(crate) fn continues(&mut self, invitation: &Invitation) -> bool {
        if self.seen_invitation.replace(invitation.number) != Some(invitation.number) {
            self.restart();
        }
        self.polls = self.remaining.has_time_left(*self.now.insert(Instant::now()));
        self.polls || matches!(self.expected, ExpectedEnd::NotAsked)
    }

    /// How long to sleep, at most, before it [continues](Self::continues); `None` to sleep until it
    /// is woken.
    pub(crate) fn sleep_limit(&mut self) -> Option<Duration> {
        // A thread without an invitation has not queried yet.
        let ExpectedEnd::At(due) = &self.expected else { return None };
        let sleep_limit = due.start.saturating_duration_since(Instant::now());
        self.remaining = Countdown::until(due.end);
        self.spin_only = Countdown::new(SPIN_ONLY);
        self.expected = ExpectedEnd::Nothing;
        Some(sleep_limit)
    }

    /// Restarts the spin time.
    fn restart(&mut self) {
        self.yields = false;
        self.remaining = Countdown::new(self.spin);
        self.spin_only = Countdown::new(SPIN_ONLY);
        self.expected = ExpectedEnd::of(self.spin);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts its calls, and copies one piece in each.
    #[derive(Default)]
    struct Counts {
        polls: AtomicUsize,
        pieces: AtomicUsize,
    }

    impl WaiterProgress for Counts {
        fn poll(&self) {
            self.polls.fetch_add(1, Ordering::SeqCst);
        }

        fn poll_blocking(&self) -> bool {
            self.pieces.fetch_add(1, Ordering::SeqCst);
            true
        }
    }

    const LONG: Duration = Duration::from_secs(3600);

    /// One poll of a wait whose spin time has just ended. Returns whether it continues.
    fn poll_after_spin(mut polling: WaiterPolling, invitation: &Invitation) -> bool {
        polling.seen_invitation = Some(invitation.number);
        polling.polls = true;
        polling.expected = ExpectedEnd::Nothing;
        polling.remaining = Countdown::until(Instant::now());
        polling.poll(invitation);
        polling.continues(invitation)
    }

    /// KnowsEnd when the end is expected, and counts the queries.
    struct KnowsEnd {
        due: Range<Instant>,
        queries: AtomicUsize,
    }

    impl KnowsEnd {
        fn queries(&self) -> usize {
            self.queries.load(Ordering::SeqCst)
        }
    }

    impl WaiterProgress for KnowsEnd {
        fn poll(&self) {}

        fn expected_end(&self) -> Option<Range<Instant>> {
            self.queries.fetch_add(1, Ordering::SeqCst);
            Some(self.due.clone())
        }
    }

    /// An engine whose transfer is expected to end between one and two hours from now.
    fn in_an_hour() -> (Arc<KnowsEnd>, Arc<dyn WaiterProgress>) {
        let start = Instant::now() + LONG;
        let knows = Arc::new(KnowsEnd { due: start..start + LONG, queries: AtomicUsize::new(0) });
        (knows.clone(), knows)
    }

    /// Polls as long as the schedule requires, and returns the time to sleep then.
    fn poll_until_sleep(polling: &mut WaiterPolling, invitation: &Invitation) -> Option<Duration> {
        while polling.continues(invitation) {
            polling.poll(invitation);
        }
        polling.sleep_limit()
    }

    /// A job that is submitted in parts invites no thread before its last part.
    #[test]
    fn a_wait_before_the_invitation_queries_the_expected_end_and_wakes_for_it() {
        let (knows, as_progress) = in_an_hour();
        let mut polling = WaiterPolling::new(DEFAULT_SPIN);
        // Also after a spurious wake-up.
        assert_eq!([polling.sleep_limit(), polling.sleep_limit()], [None, None]);
        let invitation = Invitation::new(&as_progress, None);
        let sleep_limit = poll_until_sleep(&mut polling, &invitation);
        assert_eq!(knows.queries(), 1);
        assert!(
            sleep_limit.is_some_and(|sleep_limit| LONG / 2 < sleep_limit && sleep_limit <= LONG),
            "{sleep_limit:?}"
        );
        // It now polls until the end of the range, which is two hours away.
        assert!(polling.continues(&invitation) && polling.polls);
    }

    #[test]
    fn another_invitation_restarts_the_spin_time() {
        let (knows, as_progress) = in_an_hour();
        let mut polling = WaiterPolling::new(DEFAULT_SPIN);
        let first = Invitation::new(&as_progress, None);
        assert!(poll_until_sleep(&mut polling, &first).is_some());
        // The end was not at the expected time.
        polling.remaining = Countdown::until(Instant::now());
        assert_eq!((poll_until_sleep(&mut polling, &first), knows.queries()), (None, 1));

        let second = Invitation::new(&as_progress, Some(&first));
        polling.spin = LONG;
        assert!(polling.continues(&second) && polling.polls, "it does not poll");
        polling.remaining = Countdown::until(Instant::now());
        assert!(poll_until_sleep(&mut polling, &second).is_some());
        assert_eq!(knows.queries(), 2);
    }

    #[test]
    fn a_copied_piece_restarts_the_spin_time_of_a_blocked_thread() {
        let counts = Arc::new(Counts::default());
        let as_progress: Arc<dyn WaiterProgress> = counts.clone();
        let invitation = Invitation::new(&as_progress, None);
        let counted = || [&counts.polls, &counts.pieces].map(|count| count.load(Ordering::SeqCst));
        assert!(poll_after_spin(WaiterPolling::blocking(LONG), &invitation));
        assert_eq!(counted(), [0, 1]);
        // A wait with a deadline copies no pieces, and polls no longer than its spin time.
        assert!(!poll_after_spin(WaiterPolling::new(LONG), &invitation));
        assert_eq!(counted(), [1, 1]);
    }
}
