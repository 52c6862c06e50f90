//! Priorities, deadlines, cancellation, and the ends of requests.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use terrane_testkit::random::Seeded;

use super::*;

/// A sink that keeps the I/O thread until the test lets it go on.
struct Gate {
    entered: Mutex<Sender<()>>,
    leave: Mutex<Receiver<()>>,
}

/// Keeps the I/O thread busy with a request of slot 0. Dropping the sender lets it go on.
fn hold(slabs: &Slabs, memory: &mut Guarded) -> Sender<()> {
    let (entered, has_entered) = channel();
    let (go_on, leave) = channel();
    let gate = Arc::new(Gate { entered: Mutex::new(entered), leave: Mutex::new(leave) });
    let write = request(0, memory.buffers(), SlabDirection::Write).to(&gate);
    // SAFETY: the callers keep the memory until the request has ended, which is before the return.
    unsafe { slabs.submit(vec![write]) };
    has_entered.recv().unwrap();
    go_on
}

impl SlabSink for Gate {
    fn block_ended(&self, _: usize, result: SlabResult) {
        result.unwrap();
        lock(&self.entered).send(()).unwrap();
        let _ = lock(&self.leave).recv();
    }
}

/// One file of 64 slots whose queue has one place, so that requests end in the order of submission.
fn one_by_one(folder: &Path) -> Slabs {
    open_one(folder, group(4096, 64), &SlabOptions { depth: 1, ..SlabOptions::default() })
}

const READ: SlabDirection = SlabDirection::Read { checksum: 0 };

fn order(results: &Results, count: usize) -> Vec<usize> {
    results.take(count).into_iter().map(|(index, _)| index).collect()
}

#[test]
fn reads_go_before_writes_then_by_priority_then_by_arrival() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = one_by_one(folder.path());
    let mut memory: Vec<Guarded> = (0..8).map(|_| Guarded::new(&[(0, 4096)])).collect();
    let (held, memory) = memory.split_first_mut().unwrap();
    let go_on = hold(&slabs, held);
    let results = Arc::new(Results::default());
    let wanted = [
        (SlabDirection::Write, Priority::Low, 1),
        (READ, Priority::Low, 2),
        (SlabDirection::Write, Priority::High, 1),
        (READ, Priority::Normal, 2),
        (READ, Priority::High, 2),
        (READ, Priority::Normal, 2),
        (SlabDirection::Write, Priority::Normal, 3),
    ];
    let requests = wanted.into_iter().zip(memory.iter_mut()).enumerate();
    let requests = requests.map(|(index, ((direction, priority, job), memory))| {
        let new = request(slot(index + 1), memory.buffers(), direction);
        NewRequest { index, priority, job, ..new }.to(&results)
    });
    let requests = requests.collect();
    // SAFETY: the memory is kept until all have ended.
    unsafe { slabs.submit(requests) };
    // It is the last write otherwise. A lower priority changes nothing.
    slabs.raise(JobId::new(3), Priority::High);
    slabs.raise(JobId::new(2), Priority::Low);
    drop(go_on);
    assert_eq!(order(&results, 7), [4, 3, 5, 1, 2, 6, 0]);
}

#[test]
fn deadlines_end_waiting_requests_before_they_reach_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = one_by_one(folder.path());
    let before = write(&slabs, 5, &[1; 4096]);
    let mut memory: Vec<Guarded> = (0..3).map(|_| Guarded::new(&[(0, 4096)])).collect();
    let go_on = hold(&slabs, &mut memory[0]);
    let results = Arc::new(Results::default());
    let soon = Instant::now() + Duration::from_millis(20);
    let late = request(5, memory[1].buffers(), SlabDirection::Write);
    let in_time = request(6, memory[2].buffers(), SlabDirection::Write);
    let requests = vec![
        NewRequest { deadline: Some(soon), ..late }.to(&results),
        NewRequest { deadline: Some(soon + Duration::from_secs(60)), index: 1, ..in_time }
            .to(&results),
    ];
    // SAFETY: the memory is kept until all have ended.
    unsafe { slabs.submit(requests) };
    thread::sleep(soon.saturating_duration_since(Instant::now()));
    drop(go_on);
    let mut ended = results.take(2);
    ended.sort_by_key(|(index, _)| *index);
    assert!(matches!(ended[0].1, Err(SlabFailure::TimedOut)), "{:?}", ended[0]);
    assert!(ended[1].1.is_ok());
    assert_eq!(read(&slabs, 5, 4096, before).unwrap(), [1; 4096]);
    // A deadline that has passed when the request comes.
    let new = request(5, memory[1].buffers(), SlabDirection::Write);
    let result = run(&slabs, NewRequest { deadline: Some(soon), ..new });
    assert!(matches!(result, Err(SlabFailure::TimedOut)), "{result:?}");
    assert!(read(&slabs, 5, 4096, before).is_ok());
}

#[test]
fn a_cancelled_job_does_not_reach_the_file_and_others_do() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = one_by_one(folder.path());
    let before = write(&slabs, 5, &[1; 4096]);
    let mut memory: Vec<Guarded> = (0..3).map(|_| Guarded::new(&[(0, 4096)])).collect();
    let go_on = hold(&slabs, &mut memory[0]);
    let results = Arc::new(Results::default());
    let requests = vec![
        NewRequest { job: 7, ..request(5, memory[1].buffers(), SlabDirection::Write) }.to(&results),
        NewRequest { index: 1, ..request(6, memory[2].buffers(), SlabDirection::Write) }
            .to(&results),
    ];
    // SAFETY: the memory is kept until all have ended.
    unsafe { slabs.submit(requests) };
    slabs.cancel(JobId::new(7));
    slabs.cancel(JobId::new(99));
    drop(go_on);
    let ended = results.take(2);
    assert!(matches!(ended[0], (0, Err(SlabFailure::Cancelled))), "{ended:?}");
    assert!(matches!(ended[1], (1, Ok(_))), "{ended:?}");
    assert_eq!(read(&slabs, 5, 4096, before).unwrap(), [1; 4096]);
}

/// Submits its request again each time it ends, until it is told to stop.
struct Again {
    slabs: Slabs,
    buffer: IoBuffer,
    stop: Arc<AtomicBool>,
    running: Arc<Results>,
    reads: Arc<AtomicUsize>,
}

impl SlabSink for Again {
    fn block_ended(&self, index: usize, _: SlabResult) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if self.stop.load(Ordering::Relaxed) {
            return self.running.block_ended(index, Err(SlabFailure::Closed));
        }
        let sink = Arc::new(Self {
            slabs: self.slabs.clone(),
            buffer: self.buffer,
            stop: Arc::clone(&self.stop),
            running: Arc::clone(&self.running),
            reads: Arc::clone(&self.reads),
        });
        let buffers = [self.buffer].into_iter().collect();
        let next = NewRequest { index, ..request(1, buffers, READ) }.to(&sink);
        // SAFETY: the test keeps the memory until the reads have stopped.
        unsafe { self.slabs.submit(vec![next]) };
    }
}

#[test]
fn a_write_ends_within_its_deadline_although_reads_never_pause() {
    let folder = memory_folder();
    let options =
        SlabOptions { depth: 1, max_writes_while_reads_wait: 1, ..SlabOptions::default() };
    let slabs = open_one(folder.path(), group(4096, 8), &options);
    let mut memory: Vec<Guarded> = (0..9).map(|_| Guarded::new(&[(0, 4096)])).collect();
    let running = Arc::new(Results::default());
    let (stop, reads) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (source, targets) = memory.split_first_mut().unwrap();
    for (index, target) in targets.iter_mut().enumerate() {
        let again = Again {
            slabs: slabs.clone(),
            buffer: target.buffers()[0],
            stop: Arc::clone(&stop),
            running: Arc::clone(&running),
            reads: Arc::clone(&reads),
        };
        again.block_ended(index, Err(SlabFailure::Closed));
    }
    let begin = Instant::now();
    let deadline = begin + Duration::from_secs(4);
    let new = request(2, source.buffers(), SlabDirection::Write);
    let result = run(&slabs, NewRequest { deadline: Some(deadline), ..new });
    let ended_at = Instant::now();
    stop.store(true, Ordering::Relaxed);
    running.take(8);
    assert!(result.is_ok(), "{result:?}");
    assert!(ended_at < deadline && reads.load(Ordering::Relaxed) > 100);
    assert!(
        ended_at >= begin + Duration::from_millis(1900),
        "reads went first for half of the time"
    );
}

#[test]
fn closing_ends_what_waits_and_joins_the_thread() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = one_by_one(folder.path());
    let thread = slabs.handle.thread_id;
    let mut memory: Vec<Guarded> = (0..4).map(|_| Guarded::new(&[(0, 4096)])).collect();
    let go_on = hold(&slabs, &mut memory[0]);
    let results = Arc::new(Results::default());
    let requests = memory[1..3].iter_mut().enumerate().map(|(index, memory)| {
        NewRequest { index, ..request(1, memory.buffers(), SlabDirection::Write) }.to(&results)
    });
    let requests = requests.collect();
    // SAFETY: the memory is kept until all have ended.
    unsafe { slabs.submit(requests) };
    let closer = thread::Builder::new()
        .spawn({
            let slabs = slabs.clone();
            move || slabs.close(in_a_second())
        })
        .unwrap();
    while slabs.handle.shared.inbox.send(Message::Cancel(JobId::new(99))).is_ok() {
        thread::yield_now();
    }
    drop(go_on);
    slabs.close(in_a_second());
    closer.join().unwrap();
    for (_, result) in results.take(2) {
        assert!(matches!(result, Err(SlabFailure::Closed)), "{result:?}");
    }
    // The thread's share is gone, so the thread is.
    assert_eq!(Arc::strong_count(&slabs.handle.shared), 1);
    assert!(lock(&slabs.handle.thread).is_none() && thread != thread::current().id());
    let result = run(&slabs, request(1, memory[3].buffers(), SlabDirection::Write));
    assert!(matches!(result, Err(SlabFailure::Closed)), "{result:?}");
}

#[test]
fn the_last_clone_may_drop_in_a_sink() {
    struct Last(Mutex<Option<Slabs>>, Arc<Results>);
    impl SlabSink for Last {
        fn block_ended(&self, index: usize, result: SlabResult) {
            drop(lock(&self.0).take());
            self.1.block_ended(index, result);
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let slabs = one_by_one(folder.path());
    let mut memory = Guarded::new(&[(0, 4096)]);
    let results = Arc::new(Results::default());
    let sink = Arc::new(Last(Mutex::new(None), Arc::clone(&results)));
    let write = request(1, memory.buffers(), SlabDirection::Write).to(&sink);
    let mut held = Guarded::new(&[(0, 4096)]);
    let go_on = hold(&slabs, &mut held);
    // SAFETY: the memory is kept until the request has ended.
    unsafe { slabs.submit(vec![write]) };
    *lock(&sink.0) = Some(slabs);
    drop(go_on);
    assert!(results.take(1)[0].1.is_ok());
}

#[test]
fn each_request_ends_once_whatever_is_cancelled_raised_or_closed() {
    for seed in 0..12 {
        let folder = memory_folder();
        let options = SlabOptions {
            depth: 3,
            request: ByteCount::kib(8),
            backend: if seed % 3 == 0 {
                terrane_storage::IoBackend::Threads
            } else {
                terrane_storage::IoBackend::Auto
            },
            ..SlabOptions::default()
        };
        let slabs = open_one(folder.path(), group(40_000, 64), &options);
        let results = Arc::new(Results::default());
        let per_thread = 300;
        thread::scope(|scope| {
            for thread in 0..4_u64 {
                let (slabs, results) = (slabs.clone(), Arc::clone(&results));
                scope.spawn(move || {
                    let mut random = Seeded::new(seed * 10 + thread);
                    let mut memory: Vec<Guarded> = (0..per_thread)
                        .map(|_| Guarded::new(&[(random.below(2), 1 + random.below(40_000))]))
                        .collect();
                    for (index, memory) in memory.iter_mut().enumerate() {
                        let job = random.next_u64() % 20;
                        let direction = if random.once_in(2) { SlabDirection::Write } else { READ };
                        let slot = u32::try_from(random.below(64)).unwrap();
                        let deadline = random.once_in(3).then(|| {
                            Instant::now() + Duration::from_micros(random.below_u64(20_000))
                        });
                        let new = request(slot, memory.buffers(), direction);
                        let new = NewRequest { index, job, deadline, ..new };
                        // SAFETY: the threads end after all requests have.
                        unsafe { slabs.submit(vec![new.to(&results)]) };
                        match random.below(20) {
                            0 => slabs.cancel(JobId::new(random.next_u64() % 20)),
                            1 => slabs.raise(JobId::new(random.next_u64() % 20), Priority::High),
                            2 if thread == 0 && index > 200 => slabs.close(Instant::now()),
                            _ => {}
                        }
                    }
                    // Closing ends all requests of this thread, and joins the thread.
                    slabs.close(Instant::now() + Duration::from_secs(20));
                    memory.iter().for_each(Guarded::check_guards);
                });
            }
        });
        assert_eq!(results.take(4 * per_thread).len(), 4 * per_thread);
    }
}
