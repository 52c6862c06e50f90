//! Completion queues: each value once, room bounded, and a descriptor that tells the truth.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use terrane_store::{CompletionQueue, QueueError};

fn is_readable<T>(queue: &CompletionQueue<T>) -> bool {
    let descriptor = queue.as_fd();
    let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
    poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
}

#[test]
fn values_come_in_the_order_of_the_ends() {
    let queue = CompletionQueue::new(4).unwrap();
    let places: Vec<_> = (0..3).map(|_| queue.reserve().unwrap()).collect();
    for (value, place) in places.into_iter().enumerate().rev() {
        place.deliver(value);
    }
    assert_eq!(queue.try_take(), Some(2));
    let mut rest = Vec::new();
    assert_eq!(queue.take_all(&mut rest), 2);
    assert_eq!(rest, [1, 0]);
    assert_eq!(queue.try_take(), None);
}

#[test]
fn the_descriptor_is_readable_until_everything_has_been_taken() {
    let queue = CompletionQueue::new(4).unwrap();
    assert!(!is_readable(&queue));
    let places: Vec<_> = (0..3).map(|_| queue.reserve().unwrap()).collect();
    assert!(!is_readable(&queue), "no job has ended");
    places.into_iter().for_each(|place| place.deliver(()));
    for left in (0..3).rev() {
        assert!(is_readable(&queue));
        assert_eq!(queue.try_take(), Some(()));
        assert_eq!(queue.len(), left);
    }
    assert!(!is_readable(&queue));
    queue.reserve().unwrap().deliver(());
    assert!(is_readable(&queue));
    queue.take_all(&mut Vec::new());
    assert!(!is_readable(&queue));
}

#[test]
fn jobs_and_values_together_are_bounded() {
    let queue = CompletionQueue::new(2).unwrap();
    let first = queue.reserve().unwrap();
    let second = queue.reserve().unwrap();
    let refused = queue.reserve().unwrap_err();
    assert_eq!(refused, QueueError::Full { capacity: 2, jobs: 2, values: 0 });
    first.deliver(1);
    let refused = queue.reserve().unwrap_err();
    assert_eq!(refused, QueueError::Full { capacity: 2, jobs: 1, values: 1 });
    drop(second);
    assert!(queue.reserve().is_ok(), "a dropped place is free");
    assert_eq!(CompletionQueue::<()>::new(0).unwrap_err(), QueueError::NoCapacity);
}

#[test]
fn a_wait_ends_with_a_value_with_the_last_job_or_at_the_deadline() {
    let queue = CompletionQueue::new(2).unwrap();
    assert_eq!(queue.wait(None), None, "no job can bring a value");
    let place = queue.reserve().unwrap();
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(queue.wait(Some(soon)), None);
    assert!(Instant::now() >= soon);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| queue.wait(None));
        place.deliver(7);
        assert_eq!(waiting.join().unwrap(), Some(7));
        let place = queue.reserve().unwrap();
        let waiting = scope.spawn(|| queue.wait(None));
        drop(place);
        assert_eq!(waiting.join().unwrap(), None);
    });
}

#[test]
fn threads_take_each_value_once() {
    const VALUES: usize = 10_000;
    let queue = CompletionQueue::new(64).unwrap();
    let mut taken: Vec<usize> = thread::scope(|scope| {
        let takers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut taken = Vec::new();
                    while taken.last() != Some(&usize::MAX) {
                        let soon = Some(Instant::now() + Duration::from_millis(1));
                        taken.extend(queue.wait(soon));
                    }
                    taken
                })
            })
            .collect();
        for value in (0..VALUES).chain([usize::MAX; 2]) {
            let place = loop {
                match queue.reserve() {
                    Ok(place) => break place,
                    Err(_) => thread::yield_now(),
                }
            };
            place.deliver(value);
        }
        takers.into_iter().flat_map(|taker| taker.join().unwrap()).collect()
    });
    taken.retain(|&value| value != usize::MAX);
    taken.sort_unstable();
    assert!(taken.into_iter().eq(0..VALUES));
}
