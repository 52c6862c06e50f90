//! Waiting threads that help the engine: to notice the end, and to come to it.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::engines::threads;
use crate::job::tell_rest;
use crate::sync::{Countdown, spin_loop, yield_now};

/// What an engine lets waiting threads do for it: look whether anything has ended.
///
/// To be woken by another thread costs tens of microseconds, which is as long as a small transfer
/// takes. So a thread that waits for a transfer calls [`poll`](Self::poll) for a while before it
/// goes to sleep, and a thread that only looks calls it once.
///
/// It is help and no duty: nobody may be waiting, so the engine has to notice every end by itself
/// as well.
pub trait Attend: Send + Sync {
    /// Looks once whether work of the engine has ended, and if so does what there is to do:
    /// signals [layers](crate::LayerSignals) and [finishes](crate::CopyJob::finish) jobs, those of
    /// others included.
    ///
    /// It is called on threads of callers, often, on several at once, and again from within itself
    /// (what finishing a job starts may look at another one). So it takes a microsecond or so and
    /// never blocks: where another thread is at it already, it returns. As wherever a job is
    /// finished, the engine holds no lock meanwhile that it takes to accept one.
    fn poll(&self);

    /// As [`poll`](Self::poll), on a thread that waits for the end whatever it takes, has nothing else
    /// to do, and has blocked anyway: here an engine whose library copies where it is called may do the
    /// next piece of the copy, which takes as long as it takes. The rest holds as for `poll`: where
    /// another thread is at it, it returns.
    ///
    /// Answers whether it has done a piece, after which the thread does not sleep before another
    /// [attention](DEFAULT_ATTENTION).
    fn serve(&self) -> bool {
        self.poll();
        false
    }

    /// Between which times the end is to be expected, where the engine knows. A thread that has
    /// helped for a while and is about to sleep asks; it wakes for the end, once, and helps until the
    /// later time. It asks again after another [invitation](crate::CopyJob::attend), and after a
    /// [piece](Self::serve) that it has done.
    fn due(&self) -> Option<Range<Instant>> {
        None
    }
}

/// How long a thread that waits helps before it sleeps, if its manager
/// [says](crate::TransferManager::with_attention) nothing else.
///
/// Longer than a transfer of some MiB between a device and the host takes, and than it takes to be
/// woken; short enough to be no loss where a transfer takes milliseconds.
pub const DEFAULT_ATTENTION: Duration = Duration::from_micros(200);

/// How long a thread that helps only spins between its looks. Then it lets others run, which takes
/// as long as an end is late by.
const EAGERNESS: Duration = Duration::from_micros(50);

/// Who attends to a transfer, as of the latest invitation. The engine owns it; it may own the job in
/// turn.
#[derive(Clone)]
pub(crate) struct Attendant {
    attend: Weak<dyn Attend>,
    /// How many invitations came before this one.
    number: u64,
}

impl Attendant {
    /// The attendant to take the place of `former`, which may have been the same.
    pub(crate) fn invited(attend: &Arc<dyn Attend>, former: Option<&Self>) -> Self {
        let number = former.map_or(0, |former| former.number.wrapping_add(1));
        Self { attend: Arc::downgrade(attend), number }
    }
}

/// Has the attendant look once. The caller holds no lock, as the job may end in here.
pub(crate) fn poll(attendant: &Attendant) {
    with(attendant, |attendant| attendant.poll());
}

/// Calls the attendant, if it is still there.
///
/// As on an engine's thread, nothing that drops in here may wait for threads: the caller only wants
/// to know whether a transfer has ended.
fn with<T>(attendant: &Attendant, call: impl FnOnce(&dyn Attend) -> T) -> Option<T> {
    let mut answer = None;
    threads::finishing(|| answer = attendant.attend.upgrade().map(|attendant| call(&*attendant)));
    answer
}

/// The parts of a wait in which the thread helps: for a while from each invitation on that it sees,
/// and, where the attendant knows when, about the time at which the end is to be expected.
pub(crate) struct Helping {
    attention: Duration,
    /// The number of the latest invitation that it has seen.
    seen: Option<u64>,
    left: Countdown,
    /// The part of it in which the thread only spins.
    eager: Countdown,
    helps: bool,
    /// Whether the thread may be kept for as long as a piece of the copy takes.
    serves: bool,
    expects: Expects,
}

/// What is known of when the end is due.
enum Expects {
    /// Nobody has been asked.
    NotAsked,
    /// The thread may sleep, and is to help from the one time to the other.
    At(Range<Instant>),
    /// It sleeps until it is woken.
    Nothing,
}

impl Expects {
    fn of(attention: Duration) -> Self {
        let never = cfg!(loom) || attention.is_zero();
        if never { Self::Nothing } else { Self::NotAsked }
    }
}

impl Helping {
    /// Begins a wait that has an end of its own. The caller holds no lock, as what this thread has
    /// still to tell is told.
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

    /// Begins a wait that takes what it takes.
    pub(crate) fn serving(attention: Duration) -> Self {
        Self { serves: true, ..Self::new(attention) }
    }

    /// Looks once, and lets others run, who may be what is waited for; the last time, asks when to
    /// look again. The caller holds no lock.
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

    /// Whether it is still to help this attendant, for which it then calls [`help`](Self::help).
    pub(crate) fn goes_on(&mut self, attendant: &Attendant) -> bool {
        if self.seen.replace(attendant.number) != Some(attendant.number) {
            self.renew();
        }
        self.helps = self.left.goes_on();
        self.helps || matches!(self.expects, Expects::NotAsked)
    }

    /// How long to sleep, at most, before it [goes on](Self::goes_on) again; `None` if it does not
    /// unless it is invited.
    pub(crate) fn nap(&mut self) -> Option<Duration> {
        // Whom nobody has invited yet has still to ask.
        let Expects::At(due) = &self.expects else { return None };
        let nap = due.start.saturating_duration_since(Instant::now());
        self.left = Countdown::until(due.end);
        self.eager = Countdown::new(EAGERNESS);
        self.expects = Expects::Nothing;
        Some(nap)
    }

    /// Begins to attend anew.
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

    /// Counts its calls, and does a piece at each.
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

    /// One look of a wait whose attention has just run out. Answers whether it goes on.
    fn look(mut helping: Helping, attendant: &Attendant) -> bool {
        helping.seen = Some(attendant.number);
        helping.helps = true;
        helping.expects = Expects::Nothing;
        helping.left = Countdown::until(Instant::now());
        helping.help(attendant);
        helping.goes_on(attendant)
    }

    /// Knows when the end is due, and counts who asks.
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

    /// An end that is due in an hour, for another one.
    fn in_an_hour() -> (Arc<Knows>, Arc<dyn Attend>) {
        let start = Instant::now() + LONG;
        let knows = Arc::new(Knows { due: start..start + LONG, asked: AtomicUsize::new(0) });
        (knows.clone(), knows)
    }

    /// Helps for as long as it goes on, and answers for how long to sleep then.
    fn attend_to(helping: &mut Helping, attendant: &Attendant) -> Option<Duration> {
        while helping.goes_on(attendant) {
            helping.help(attendant);
        }
        helping.nap()
    }

    /// As with a job that is submitted a part at a time: nobody can be invited before the last.
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
        // It helps until the later time then: this one is two hours off.
        assert!(helping.goes_on(&attendant) && helping.helps);
    }

    #[test]
    fn another_invitation_begins_the_attention_anew() {
        let (knows, as_attend) = in_an_hour();
        let mut helping = Helping::new(DEFAULT_ATTENTION);
        let first = Attendant::invited(&as_attend, None);
        assert!(attend_to(&mut helping, &first).is_some());
        // The end was not when it was due.
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
        // A wait with an end of its own is not kept, and looks no longer than it was to.
        assert!(!look(Helping::new(LONG), &attendant));
        assert_eq!(counted(), [1, 1]);
    }
}
