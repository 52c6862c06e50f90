//! Two threads that run at the same time on two processors, and a channel between them.
//!
//! A round begins when both threads are running. It does not count if the scheduler preempted either
//! thread, because it would then measure the scheduler. Most rounds are short, some hundred
//! microseconds. A busy machine therefore has fewer valid rounds, and almost the same median. A long
//! round is repeated until it is undisturbed.

use std::fs;
use std::hint;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use terrane_core::sync::lock;

/// Two threads that respond to each other within this time are both running. A cache line takes
/// less than a microsecond to another processor and back.
const PROMPT: Duration = Duration::from_micros(2);

/// The most disturbed rounds that [`until_undisturbed`] discards.
pub const MOST_DISCARDED: u32 = 4;

/// The result of a long round.
pub struct LongRound<T> {
    pub value: T,
    /// The disturbed rounds before it.
    pub discarded: u32,
    /// Whether it was disturbed too, after [`MOST_DISCARDED`] other ones.
    pub is_disturbed: bool,
}

/// Runs `lead` and `follow` at the same time on two threads, `rounds` times. Returns the results of
/// `lead` from the undisturbed rounds, or from all rounds if all were disturbed.
pub fn side_by_side<T: Send>(
    rounds: u32,
    lead: impl FnMut() -> T,
    follow: impl FnMut() + Send,
) -> Vec<T> {
    let rounds = all_rounds(rounds, lead, follow);
    let all_disturbed = !rounds.iter().any(|(_, is_undisturbed)| *is_undisturbed);
    let counted = rounds.into_iter().filter(|(_, is_undisturbed)| all_disturbed || *is_undisturbed);
    counted.map(|(value, _)| value).collect()
}

/// Runs `lead` and `follow` at the same time on two threads until a round is undisturbed, at most
/// `MOST_DISCARDED + 1` times. This is for rounds so long that many of them would take minutes.
pub fn until_undisturbed<T: Send>(
    mut lead: impl FnMut() -> T,
    mut follow: impl FnMut() + Send,
) -> Option<LongRound<T>> {
    let mut discarded = 0;
    loop {
        let (value, is_undisturbed) = all_rounds(1, &mut lead, &mut follow).pop()?;
        if is_undisturbed || discarded == MOST_DISCARDED {
            return Some(LongRound { value, discarded, is_disturbed: !is_undisturbed });
        }
        discarded += 1;
    }
}

/// The result of `lead` from each round, and whether neither thread was preempted in it.
fn all_rounds<T: Send>(
    rounds: u32,
    mut lead: impl FnMut() -> T,
    follow: impl FnMut() + Send,
) -> Vec<(T, bool)> {
    let meeting = Meeting::default();
    let follower = || {
        let mut follow = follow;
        (0..rounds).map(|_| undisturbed(|| meeting.follow(), &mut follow).1).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let other = scope.spawn(follower);
        let led: Vec<_> = (0..rounds).map(|_| undisturbed(|| meeting.lead(), &mut lead)).collect();
        let other = other.join().unwrap_or_default();
        let both = led.into_iter().zip(other);
        both.map(|((value, led), followed)| (value, led && followed)).collect()
    })
}

/// Meets the other thread before and after the work. Returns whether this thread was not preempted.
fn undisturbed<T>(meet: impl Fn(), work: impl FnOnce() -> T) -> (T, bool) {
    meet();
    let before = preemptions();
    meet();
    let value = work();
    (value, preemptions() == before)
}

/// The number of preemptions of the calling thread; 0 if the kernel does not report it.
fn preemptions() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// A rendezvous of two threads, for repeated use.
#[derive(Default)]
struct Meeting {
    call: CachePadded<AtomicU32>,
    answer: CachePadded<AtomicU32>,
}

/// The bit of a call that ends the rendezvous.
const GO: u32 = 1;

impl Meeting {
    /// Calls until the other thread responds at once.
    fn lead(&self) {
        let mut call = self.call.load(Ordering::Relaxed) & !GO;
        loop {
            call = call.wrapping_add(2);
            let called = Instant::now();
            self.call.store(call, Ordering::Release);
            while self.answer.load(Ordering::Acquire) != call {
                hint::spin_loop();
            }
            if called.elapsed() < PROMPT {
                break;
            }
        }
        self.call.store(call | GO, Ordering::Release);
        // The next call must not overwrite this one.
        while self.answer.load(Ordering::Acquire) != call | GO {
            hint::spin_loop();
        }
    }

    /// Responds until the call that ends the rendezvous.
    fn follow(&self) {
        loop {
            let call = self.call.load(Ordering::Acquire);
            if call != self.answer.load(Ordering::Relaxed) {
                self.answer.store(call, Ordering::Release);
                if call & GO == GO {
                    return;
                }
            }
            hint::spin_loop();
        }
    }
}

/// The number of values in one load. A load spreads the channel's cost over its values, because the
/// channel is not the subject of the measurement.
pub const LOAD: usize = 64;
/// The maximum number of loads in transit.
pub const LOADS: usize = 8;

/// A ring from one thread to another. The locks make it possible without unsafe code. No thread
/// ever waits for a lock.
pub struct Ring<T> {
    slots: [CachePadded<Slot<T>>; LOADS],
}

struct Slot<T> {
    full: AtomicBool,
    load: Mutex<Vec<T>>,
}

impl<T> Ring<T> {
    pub fn new() -> Self {
        let slot = |_| {
            let load = Mutex::new(Vec::with_capacity(LOAD));
            CachePadded::new(Slot { full: AtomicBool::new(false), load })
        };
        Self { slots: std::array::from_fn(slot) }
    }

    /// Waits for an empty slot and calls `fill` to write the load `number`.
    pub fn send(&self, number: usize, fill: impl FnOnce(&mut Vec<T>)) {
        self.pass(number, false, fill);
    }

    /// Waits for the load `number` and calls `empty` to drain it.
    pub fn receive(&self, number: usize, empty: impl FnOnce(&mut Vec<T>)) {
        self.pass(number, true, empty);
    }

    /// Waits until every load has been drained and its values processed.
    pub fn wait_until_empty(&self) {
        for slot in &self.slots {
            while slot.full.load(Ordering::Acquire) {
                hint::spin_loop();
            }
        }
    }

    fn pass(&self, number: usize, full: bool, work: impl FnOnce(&mut Vec<T>)) {
        let Some(slot) = self.slots.get(number % LOADS) else { return };
        while slot.full.load(Ordering::Acquire) != full {
            hint::spin_loop();
        }
        work(&mut lock(&slot.load));
        slot.full.store(!full, Ordering::Release);
    }
}
