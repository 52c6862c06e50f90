//! Lets a thread that waits for a transfer poll the engine, or copy for it, before it sleeps.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::engine::threads;
use crate::hazard::notify::tell_rest;
use crate::sync::{Countdown, spin_loop, yield_now};

/// The work that an engine offers to waiting threads: to check whether anything has ended.
///
/// Waking a thread takes tens of microseconds, as long as a small transfer. So a thread that waits
/// for a transfer calls [`poll`](Self::poll) for a while before it sleeps. A thread that only
/// checks for the end calls it once.
///
/// This help is optional: no thread may be waiting, so the engine has to notice every end by itself
/// as well.
pub trait Attend: Send + Sync {
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
    /// Returns whether it has done a piece. If so, the thread does not sleep before another
    /// [attention](DEFAULT_ATTENTION) time.
    fn serve(&self) -> bool {
        self.poll();
        false
    }

    /// The time range in which the end is expected, if the engine knows it. A thread that has
    /// helped for a while asks before it sleeps. It wakes once, at the start of the range, and
    /// helps until its end. It asks again after another [invitation](crate::CopyJob::attend), and
    /// after a [piece](Self::serve) that it has done.
    fn due(&self) -> Option<Range<Instant>> {
        None
    }
}

/// How long a waiting thread helps before it sleeps, unless its manager
/// [sets](crate::TransferManager::with_attention) another time.
///
/// It is longer than waking a thread takes, and longer than a transfer of some MiB between a device
/// and the host. It is short enough to cost little where a transfer takes milliseconds.
pub const DEFAULT_ATTENTION: Duration = Duration::from_micros(200);

/// How long a helping thread only spins between its polls. After that it yields to other threads,
/// which may delay the notice of an end by as long as they run.
const EAGERNESS: Duration = Duration::from_micros(50);

/// The attendant of a transfer, as of the latest invitation. The engine owns it; it may own the job
/// in turn.
#[derive(Clone)]
pub(crate) struct Attendant {
    attend: Weak<dyn Attend>,
    /// The number of earlier invitations.
    number: u64,
}

impl Attendant {
    /// The attendant that replaces `former`, which may be the same.
    pub(crate) fn invited(attend: &Arc<dyn Attend>, former: Option<&Self>) -> Self {
        let number = former.map_or(0, |former| former.number.wrapping_add(1));
        Self { attend: Arc::downgrade(attend), number }
    }
}

/// Polls the attendant once. The caller holds no lock, as the job may end in here.
pub(crate) fn poll(attendant: &Attendant) {
    with(attendant, |attendant| attendant.poll());
}

/// Calls the attendant, if it still exists.
///
/// As on an engine's thread, nothing that drops in here may join threads: the caller only checks
/// whether a transfer has ended.
fn with<T>(attendant: &Attendant, call: impl FnOnce(&dyn Attend) -> T) -> Option<T> {
    let mut answer = None;
    threads::finishing(|| answer = attendant.attend.upgrade().map(|attendant| call(&*attendant)));
    answer
}

/// The parts of a wait in which the thread helps. It helps for a while after each invitation that
/// it sees. If the attendant knows when the end is expected, it also helps around that time.
pub(crate) struct Helping {
    attention: Duration,
    /// The number of the latest invitation that it has seen.
    seen: Option<u64>,
    /// The attention time that is left.
    left: Countdown,
    /// The time that is left in which the thread only spins.
    eager: Countdown,
    helps: bool,
    /// Whether the thread may be used for as long as a piece of the copy takes.
    serves: bool,
    expects: Expects,
}

/// The state of the question when the end is expected.
enum Expects {
    /// The attendant has not been asked.
    NotAsked,
    /// The thread may sleep, and then helps from the start to the end of this range.
    At(Range<Instant>),
    /// The thread sleeps until it is woken.
    Nothing,
}

impl Expects {
    fn of(attention: Duration) -> Self {
        let never = cfg!(loom) || attention.is_zero();
        if never { Self::Nothing } else { Self::NotAsked }
    }
}

impl Helping {
    /// Begins a wait that has a deadline. The caller holds no lock, as this delivers the
    /// notifications that are still on this thread's list.
    pub(crate) fn new(attention: Duration) -> Self {
        tell_rest();
        Self {
            attention,
            seen: None,
            left: Countdown::new(attention),
            eager: Countdown::new(EAGERNESS),
            helps: false,
            serves: false,
            expects: Expects::of(attention),
        }
    }

    /// Begins a wait without a deadline.
    pub(crate) fn serving(attention: Duration) -> Self {
        Self { serves: true, ..Self::new(attention) }
    }

    /// Polls once, and yields to other threads, which may have to run for the transfer to end. The
    /// last time, it asks when to poll again. The caller holds no lock.
    pub(crate) fn help(&mut self, attendant: &Attendant) {
        if self.helps {
            let has_done = if self.serves {
                with(attendant, |attendant| attendant.serve()) == Some(true)
            } else {
                poll(attendant);
                false
            };
            tell_rest();
            if has_done {
                self.renew();
            } else if self.eager.goes_on() {
                spin_loop();
            } else {
                yield_now();
            }
            return;
        }
        let due = with(attendant, |attendant| attendant.due()).flatten();
        self.expects = due.map_or(Expects::Nothing, Expects::At);
    }

    /// Whether the thread should help this attendant, for which it then calls [`help`](Self::help).
    pub(crate) fn goes_on(&mut self, attendant: &Attendant) -> bool {
        if self.seen.replace(attendant.number) != Some(attendant.number) {
            self.renew();
        }
        self.helps = self.left.goes_on();
        self.helps || matches!(self.expects, Expects::NotAsked)
    }

    /// How long to sleep, at most, before it [goes on](Self::goes_on) again; `None` if only an
    /// invitation makes it go on.
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        // A thread without an invitation has not asked yet.
        let Expects::At(due) = &self.expects else { return None };
        let nap = due.start.saturating_duration_since(Instant::now());
        self.left = Countdown::until(due.end);
        self.eager = Countdown::new(EAGERNESS);
        self.expects = Expects::Nothing;
        Some(nap)
    }

    /// Restarts the attention time.
    fn renew(&mut self) {
        self.left = Countdown::new(self.attention);
        self.eager = Countdown::new(EAGERNESS);
        self.expects = Expects::of(self.attention);
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

    impl Attend for Counts {
        fn poll(&self) {
            self.polls.fetch_add(1, Ordering::SeqCst);
        }

        fn serve(&self) -> bool {
            self.pieces.fetch_add(1, Ordering::SeqCst);
            true
        }
    }

    const LONG: Duration = Duration::from_secs(3600);

    /// One poll of a wait whose attention has just run out. Returns whether it goes on.
    fn look(mut helping: Helping, attendant: &Attendant) -> bool {
        helping.seen = Some(attendant.number);
        helping.helps = true;
        helping.expects = Expects::Nothing;
        helping.left = Countdown::until(Instant::now());
        helping.help(attendant);
        helping.goes_on(attendant)
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

    impl Attend for Knows {
        fn poll(&self) {}

        fn due(&self) -> Option<Range<Instant>> {
            self.asked.fetch_add(1, Ordering::SeqCst);
            Some(self.due.clone())
        }
    }

    /// An attendant whose end is expected between one and two hours from now.
    fn in_an_hour() -> (Arc<Knows>, Arc<dyn Attend>) {
        let start = Instant::now() + LONG;
        let knows = Arc::new(Knows { due: start..start + LONG, asked: AtomicUsize::new(0) });
        (knows.clone(), knows)
    }

    /// Helps while it goes on, and returns how long to sleep then.
    fn attend_to(helping: &mut Helping, attendant: &Attendant) -> Option<Duration> {
        while helping.goes_on(attendant) {
            helping.help(attendant);
        }
        helping.nap()
    }

    /// A job that is submitted in parts invites no thread before its last part.
    #[test]
    fn a_wait_that_begins_before_the_invitation_asks_when_the_end_is_due_and_wakes_for_it() {
        let (knows, as_attend) = in_an_hour();
        let mut helping = Helping::new(DEFAULT_ATTENTION);
        // Woken for nothing, too.
        assert_eq!([helping.nap(), helping.nap()], [None, None]);
        let attendant = Attendant::invited(&as_attend, None);
        let nap = attend_to(&mut helping, &attendant);
        assert_eq!(knows.asked(), 1);
        assert!(nap.is_some_and(|nap| LONG / 2 < nap && nap <= LONG), "{nap:?}");
        // It now helps until the end of the range, which is two hours away.
        assert!(helping.goes_on(&attendant) && helping.helps);
    }

    #[test]
    fn another_invitation_begins_the_attention_anew() {
        let (knows, as_attend) = in_an_hour();
        let mut helping = Helping::new(DEFAULT_ATTENTION);
        let first = Attendant::invited(&as_attend, None);
        assert!(attend_to(&mut helping, &first).is_some());
        // The end was not at the expected time.
        helping.left = Countdown::until(Instant::now());
        assert_eq!((attend_to(&mut helping, &first), knows.asked()), (None, 1));

        let second = Attendant::invited(&as_attend, Some(&first));
        helping.attention = LONG;
        assert!(helping.goes_on(&second) && helping.helps, "it does not help");
        helping.left = Countdown::until(Instant::now());
        assert!(attend_to(&mut helping, &second).is_some());
        assert_eq!(knows.asked(), 2);
    }

    #[test]
    fn a_piece_renews_the_attention_of_a_thread_that_serves() {
        let counts = Arc::new(Counts::default());
        let as_attend: Arc<dyn Attend> = counts.clone();
        let attendant = Attendant::invited(&as_attend, None);
        let counted = || [&counts.polls, &counts.pieces].map(|count| count.load(Ordering::SeqCst));
        assert!(look(Helping::serving(LONG), &attendant));
        assert_eq!(counted(), [0, 1]);
        // A wait with a deadline does no pieces, and polls no longer than its attention.
        assert!(!look(Helping::new(LONG), &attendant));
        assert_eq!(counted(), [1, 1]);
    }
}
