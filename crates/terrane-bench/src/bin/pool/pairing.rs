//! Two threads that are on their processors at the same time, and a channel between them.
//!
//! Rounds are short, some hundred microseconds. They begin when both threads are seen to run, and
//! one in which the scheduler took either off its processor does not count: it would measure the
//! scheduler. So a machine that is busy with other things gives fewer rounds, and much the same
//! median.

use std::fs;
use std::hint;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;
use terrane_core::sync::lock;

/// Two threads that answer one another within this time are both running: a line goes to another
/// processor and back in less than a microsecond.
const PROMPT: Duration = Duration::from_micros(2);

/// Runs `lead` and `follow` at the same time on two threads, `rounds` times, and answers what
/// `lead` came to in the rounds that were not disturbed; in all of them, if all were.
pub fn side_by_side<T: Send>(
    rounds: u32,
    mut lead: impl FnMut() -> T,
    follow: impl FnMut() + Send,
) -> Vec<T> {
    let meeting = Meeting::default();
    let follower = || {
        let mut follow = follow;
        (0..rounds).map(|_| undisturbed(|| meeting.follow(), &mut follow).1).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        let other = scope.spawn(follower);
        let led: Vec<_> = (0..rounds).map(|_| undisturbed(|| meeting.lead(), &mut lead)).collect();
        let other = other.join().unwrap_or_default();
        let all_disturbed = !led.iter().zip(&other).any(|(led, other)| led.1 && *other);
        let counted = led.into_iter().zip(other);
        let counted = counted.filter(|(led, other)| all_disturbed || (led.1 && *other));
        counted.map(|((value, _), _)| value).collect()
    })
}

/// Meets the other thread, twice, and works; answers whether the scheduler left this one alone.
fn undisturbed<T>(meet: impl Fn(), work: impl FnOnce() -> T) -> (T, bool) {
    meet();
    let before = preemptions();
    meet();
    let value = work();
    (value, preemptions() == before)
}

/// How often the calling thread was taken off its processor; 0 where the kernel does not say.
fn preemptions() -> u64 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Where two threads meet, over and over.
#[derive(Default)]
struct Meeting {
    call: CachePadded<AtomicU32>,
    answer: CachePadded<AtomicU32>,
}

/// Said in a call: off we go.
const GO: u32 = 1;

impl Meeting {
    /// Calls until the other answers at once.
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
        // The next call must not overtake this one.
        while self.answer.load(Ordering::Acquire) != call | GO {
            hint::spin_loop();
        }
    }

    /// Answers until it goes off.
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

/// How many values go over at a time: the channel, which is not what is measured, costs each of
/// them a part of a line.
pub const LOAD: usize = 64;
/// How many loads may be on their way.
pub const LOADS: usize = 8;

/// A ring from one thread to another. The locks keep this free of unsafe code. No thread ever waits
/// for one.
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

    /// Lets `fill` push the next load.
    pub fn send(&self, number: usize, fill: impl FnOnce(&mut Vec<T>)) {
        self.pass(number, false, fill);
    }

    /// Lets `empty` take the next load out.
    pub fn receive(&self, number: usize, empty: impl FnOnce(&mut Vec<T>)) {
        self.pass(number, true, empty);
    }

    /// Waits until every load has been taken out, and what was in it dealt with.
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
