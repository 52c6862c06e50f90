//! Lets a thread that waits for a transfer poll the engine, or copy for it, before it sleeps.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::engine::threads;
use crate::hazard::notify::notify_pending;
use crate::sync::{Countdown, spin_loop, yield_now};

/// Lets a thread that waits for a transfer poll the engine before it sleeps.
///
/// Waking a thread takes tens of microseconds, as long as a small transfer. So a thread that waits
/// for a transfer calls [`poll`](Self::poll) for a while before it sleeps. A thread that only
/// checks for the end calls it once.
///
/// An engine must also notice every end by itself, as there may be no waiting thread.
pub trait WaiterProgress: Send + Sync {
    /// Checks once whether work of the engine has ended. If so, it does what follows: it signals
    /// [layers](crate::LayerSignals) and [finishes](crate::CopyJob::finish) jobs, including those
    /// that other threads wait for.
    ///
    /// Callers' threads call it often, several at once, and again from within itself: finishing a
    /// job may start code that polls another. So it takes about a microsecond and never blocks; if
    /// another thread is inside, it returns. As wherever a job is finished, the engine holds no
    /// lock meanwhile that it takes to accept one.
    fn poll(&self);

    /// Like [`poll`](Self::poll), for a thread that has blocked until the end, without a deadline.
    /// An engine whose library copies on the calling thread may copy the next piece here, however
    /// long that takes. Otherwise the rules of `poll` hold: if another thread is inside, it
    /// returns.
    ///
    /// Returns whether it has copied a piece. If so, the thread polls for another
    /// [spin](DEFAULT_SPIN) time before it sleeps.
    fn poll_blocking(&self) -> bool {
        self.poll();
        false
    }

    /// The time range in which the end is expected, if the engine knows it. A thread asks before it
    /// sleeps. It wakes once, at the start of the range, and polls until its end. It asks again
    /// after another [invitation](crate::CopyJob::invite_waiters), and after a
    /// [piece](Self::poll_blocking) that it has copied.
    fn expected_end(&self) -> Option<Range<Instant>> {
        None
    }
}

/// How long a waiting thread polls before it sleeps, unless its manager
/// [sets](crate::TransferManager::with_spin) another time.
///
/// It is longer than waking a thread takes, and longer than a transfer of some MiB between a device
/// and the host. It is short enough to cost little where a transfer takes milliseconds.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(200);

/// How long a polling thread only spins between its polls. After that it yields to other threads,
/// which may delay the notice of an end by as long as they run.
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
    /// The invitation that replaces `former`. Both may be of one value.
    pub(crate) fn new(progress: &Arc<dyn WaiterProgress>, former: Option<&Self>) -> Self {
        let number = former.map_or(0, |former| former.number.wrapping_add(1));
        Self { progress: Arc::downgrade(progress), number }
    }
}

/// Polls once. The caller holds no lock, as the job may end in here.
pub(crate) fn poll(invitation: &Invitation) {
    with(invitation, |progress| progress.poll());
}

/// Calls the engine, if it still offers this.
///
/// As on an engine's thread, nothing that drops in here may join threads: the caller only checks
/// whether a transfer has ended.
fn with<T>(invitation: &Invitation, call: impl FnOnce(&dyn WaiterProgress) -> T) -> Option<T> {
    let mut answer = None;
    threads::finishing(|| answer = invitation.progress.upgrade().map(|progress| call(&*progress)));
    answer
}

/// When a waiting thread polls. It polls for a while after each invitation that
/// it sees. If the engine knows when the end is expected, it also polls around that time.
pub(crate) struct WaiterPolling {
    spin: Duration,
    /// The number of the latest invitation that it has seen.
    seen: Option<u64>,
    /// The spin time that is left.
    left: Countdown,
    /// The time that is left in which the thread only spins.
    spin_only: Countdown,
    /// When the thread last looked at the clock: once for each poll.
    now: Option<Instant>,
    polls: bool,
    /// Whether it yields before the next poll.
    yields: bool,
    /// Whether the thread may be used for as long as a piece of the copy takes.
    may_block: bool,
    expected: ExpectedEnd,
}

/// The expected end, as far as the thread knows it.
enum ExpectedEnd {
    /// The engine has not been asked.
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
    /// Begins a wait that has a deadline. The caller holds no lock, as this delivers the
    /// notifications that are still on this thread's list.
    pub(crate) fn new(spin: Duration) -> Self {
        notify_pending();
        Self {
            spin,
            seen: None,
            left: Countdown::new(spin),
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

    /// Polls once. If the last poll did nothing, it yields first to other threads, which may have to
    /// run for the transfer to end. The last time, it asks when to poll again. The caller holds no
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
                with(invitation, |progress| progress.poll_blocking()) == Some(true)
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
        let due = with(invitation, |progress| progress.expected_end()).flatten();
        self.expected = due.map_or(ExpectedEnd::Nothing, ExpectedEnd::At);
    }

    /// Whether the thread should call [`poll`](Self::poll) before it sleeps.
    pub(crate) fn continues(&mut self, invitation: &Invitation) -> bool {
        if self.seen.replace(invitation.number) != Some(invitation.number) {
            self.restart();
        }
        self.polls = self.left.has_time_left(*self.now.insert(Instant::now()));
        self.polls || matches!(self.expected, ExpectedEnd::NotAsked)
    }

    /// How long to sleep, at most, before it [continues](Self::continues); `None` to sleep until it
    /// is woken.
    pub(crate) fn sleep_limit(&mut self) -> Option<Duration> {
        // A thread without an invitation has not asked yet.
        let ExpectedEnd::At(due) = &self.expected else { return None };
        let sleep_limit = due.start.saturating_duration_since(Instant::now());
        self.left = Countdown::until(due.end);
        self.spin_only = Countdown::new(SPIN_ONLY);
        self.expected = ExpectedEnd::Nothing;
        Some(sleep_limit)
    }

    /// Restarts the spin time.
    fn restart(&mut self) {
        self.yields = false;
        self.left = Countdown::new(self.spin);
        self.spin_only = Countdown::new(SPIN_ONLY);
        self.expected = ExpectedEnd::of(self.spin);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts its calls, and does one piece in each.
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

    /// One poll of a wait whose spin has just run out. Returns whether it goes on.
    fn look(mut polling: WaiterPolling, invitation: &Invitation) -> bool {
        polling.seen = Some(invitation.number);
        polling.polls = true;
        polling.expected = ExpectedEnd::Nothing;
        polling.left = Countdown::until(Instant::now());
        polling.poll(invitation);
        polling.continues(invitation)
    }

    /// Knows when the end is due, and counts the questions.
    struct Knows {
        due: Range<Instant>,
        asked: AtomicUsize,
    }

    impl Knows {
        fn asked(&self) -> usize {
            self.asked.load(Ordering::SeqCst)
        }
    }

    impl WaiterProgress for Knows {
        fn poll(&self) {}

        fn expected_end(&self) -> Option<Range<Instant>> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            Some(self.due.clone())
        }
    }

    /// An engine whose transfer is expected to end between one and two hours from now.
    fn in_an_hour() -> (Arc<Knows>, Arc<dyn WaiterProgress>) {
        let start = Instant::now() + LONG;
        let knows = Arc::new(Knows { due: start..start + LONG, asked: AtomicUsize::new(0) });
        (knows.clone(), knows)
    }

    /// Helps while it goes on, and returns how long to sleep then.
    fn attend_to(polling: &mut WaiterPolling, invitation: &Invitation) -> Option<Duration> {
        while polling.continues(invitation) {
            polling.poll(invitation);
        }
        polling.sleep_limit()
    }

    /// A job that is submitted in parts invites no thread before its last part.
    #[test]
    fn a_wait_that_begins_before_the_invitation_asks_when_the_end_is_due_and_wakes_for_it() {
        let (knows, as_progress) = in_an_hour();
        let mut polling = WaiterPolling::new(DEFAULT_SPIN);
        // Woken for nothing, too.
        assert_eq!([polling.sleep_limit(), polling.sleep_limit()], [None, None]);
        let invitation = Invitation::new(&as_progress, None);
        let sleep_limit = attend_to(&mut polling, &invitation);
        assert_eq!(knows.asked(), 1);
        assert!(
            sleep_limit.is_some_and(|sleep_limit| LONG / 2 < sleep_limit && sleep_limit <= LONG),
            "{sleep_limit:?}"
        );
        // It now polls until the end of the range, which is two hours away.
        assert!(polling.continues(&invitation) && polling.polls);
    }

    #[test]
    fn another_invitation_begins_the_attention_anew() {
        let (knows, as_progress) = in_an_hour();
        let mut polling = WaiterPolling::new(DEFAULT_SPIN);
        let first = Invitation::new(&as_progress, None);
        assert!(attend_to(&mut polling, &first).is_some());
        // The end was not at the expected time.
        polling.left = Countdown::until(Instant::now());
        assert_eq!((attend_to(&mut polling, &first), knows.asked()), (None, 1));

        let second = Invitation::new(&as_progress, Some(&first));
        polling.spin = LONG;
        assert!(polling.continues(&second) && polling.polls, "it does not poll");
        polling.left = Countdown::until(Instant::now());
        assert!(attend_to(&mut polling, &second).is_some());
        assert_eq!(knows.asked(), 2);
    }

    #[test]
    fn a_piece_renews_the_attention_of_a_thread_that_serves() {
        let counts = Arc::new(Counts::default());
        let as_progress: Arc<dyn WaiterProgress> = counts.clone();
        let invitation = Invitation::new(&as_progress, None);
        let counted = || [&counts.polls, &counts.pieces].map(|count| count.load(Ordering::SeqCst));
        assert!(look(WaiterPolling::blocking(LONG), &invitation));
        assert_eq!(counted(), [0, 1]);
        // A wait with a deadline does no pieces, and polls no longer than its spin.
        assert!(!look(WaiterPolling::new(LONG), &invitation));
        assert_eq!(counted(), [1, 1]);
    }
}
