//! Threads that wait for a transfer and copy for it.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::ByteCount;
use terrane_layout::LayoutConfig;
use terrane_nixl::NixlEngineOptions;
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::model::Image;
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_transfer::{Completion, Endpoint, Outcome, Transfer, TransferError, TransferManager};

use super::support::*;

const TIMEOUT: Duration = Duration::from_secs(300);

/// Reports that its drop has begun, and returns from the drop when permitted.
struct Gate {
    entered: Sender<()>,
    leave: Receiver<()>,
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.entered.send(());
        let _ = self.leave.recv_timeout(TIMEOUT);
    }
}

/// An engine whose thread is blocked in the drop of a guard while this value lives.
struct Held {
    // Declared first, because the engine joins its thread.
    _leave: Sender<()>,
    manager: TransferManager,
}

impl Held {
    fn new(pair: &Pair, options: NixlEngineOptions) -> Self {
        // A waiting thread advances the transfer until it ends.
        let manager = TransferManager::new([pair.engine(options)]).with_spin(TIMEOUT);
        let (local, remote) =
            (pair.local(config(1), CONTIGUOUS), pair.remote(config(1), CONTIGUOUS));
        let ((entered, is_entered), (leave, may_leave)) = (channel(), channel());
        // No thread waits for this transfer, so the engine's thread ends it.
        let hold = local.hold_for_write(&[0]).unwrap();
        let transfer = Transfer::new(&local, &remote).blocks(&[0], &[0]).after(&hold.ticket());
        drop(manager.submit(transfer, Gate { entered, leave: may_leave }).unwrap());
        drop(hold);
        is_entered.recv_timeout(TIMEOUT).unwrap();
        Self { _leave: leave, manager }
    }
}

/// The result of `wait` on a new thread, within a time limit.
fn on_a_thread<T: Send + 'static>(wait: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, answer) = channel();
    let waits = move || sender.send(wait()).is_ok();
    let waiting = thread::Builder::new().name("waits".to_owned()).spawn(waits).unwrap();
    let answer = match answer.recv_timeout(TIMEOUT) {
        Err(RecvTimeoutError::Timeout) => panic!("no thread copies"),
        answer => answer.unwrap(),
    };
    assert!(waiting.join().unwrap());
    answer
}

/// Waits by [`Completion::wait`].
fn waited<G: Send + 'static>(completion: Completion<G>) -> Outcome<G> {
    on_a_thread(|| completion.wait())
}

/// Requests that begin and end within runs, two at a time.
fn short_requests() -> NixlEngineOptions {
    NixlEngineOptions {
        request_bytes: ByteCount::new(1000),
        request_descriptors: NonZeroUsize::new(3).unwrap(),
        requests: NonZeroUsize::new(2).unwrap(),
        ..NixlEngineOptions::default()
    }
}

fn check_copy_by_waiter(
    manager: &TransferManager,
    from: &Endpoint,
    to: &Endpoint,
    access: &dyn PieceAccess,
) {
    let source = Image::scribble(from, access, 3);
    let mut expected = Image::scribble(to, access, 4);
    expected.transfer(&source, &[3, 4, 0], &[1, 2, 5], 0..2);
    let transfer = Transfer::new(from, to).blocks(&[3, 4, 0], &[1, 2, 5]);
    let outcome = waited(manager.submit(transfer, "guard").unwrap());
    assert_eq!((outcome.guard, outcome.result.is_ok()), ("guard", true));
    Image::of(to, access).assert_equals(&expected, "after a thread has copied that waited");
}

#[test]
fn a_waiting_thread_copies_while_the_engines_thread_is_busy() {
    let pair = Pair::new();
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    for options in [NixlEngineOptions::default(), short_requests()] {
        let held = Held::new(&pair, options);
        let ends = || (pair.local(config(8), CONTIGUOUS), pair.remote(config(8), CONTIGUOUS));
        let (local, remote) = ends();
        check_copy_by_waiter(&held.manager, &local, &remote, &PeersInProcess);
        let (local, remote) = ends();
        check_copy_by_waiter(&held.manager, &remote, &local, &PeersInProcess);
        let file = Endpoint::new(registered(&files, &pair.here, config(8), CONTIGUOUS)).unwrap();
        check_copy_by_waiter(&held.manager, &local, &file, &InProcess);
        check_copy_by_waiter(&held.manager, &file, &local, &InProcess);
    }
}

#[test]
fn a_thread_that_waits_for_a_layer_copies_and_may_stop() {
    let pair = Pair::new();
    let ends = (pair.local(config(8), CONTIGUOUS), pair.remote(config(8), CONTIGUOUS));
    let submit = |manager: &TransferManager| {
        let transfer = Transfer::new(&ends.0, &ends.1).blocks(&[1, 2], &[5, 6]).layer_by_layer();
        manager.submit(transfer, ()).unwrap()
    };
    let wait = |completion: &Completion<()>| {
        let layers = completion.layers().unwrap();
        on_a_thread(move || layers.wait(0)).unwrap();
    };
    let held = Held::new(&pair, short_requests());
    let completion = submit(&held.manager);
    wait(&completion);
    // The engine's thread copies the rest once it is free.
    drop(held);
    end_of(completion).result.unwrap();

    let manager = TransferManager::new([pair.engine(short_requests())]);
    let completion = submit(&manager);
    wait(&completion);
    end_of(completion).result.unwrap();
}

#[test]
fn a_waiting_thread_detects_the_deadline() {
    let pair = Pair::new();
    let (local, remote) = (pair.local(config(8), CONTIGUOUS), pair.remote(config(8), CONTIGUOUS));
    let held = Held::new(&pair, NixlEngineOptions::default());
    let late = Transfer::new(&local, &remote).blocks(&[0], &[0]).deadline(Instant::now());
    let outcome = waited(held.manager.submit(late, ()).unwrap());
    assert!(matches!(outcome.result, Err(TransferError::DeadlineExceeded { .. })), "{outcome:?}");
}

/// Waits for another transfer of the same engine when it drops.
struct WaitsForAnother(Option<Completion<()>>);

impl Drop for WaitsForAnother {
    fn drop(&mut self) {
        if let Some(other) = self.0.take() {
            other.wait().result.unwrap();
        }
    }
}

/// The guard drops on the thread that waits for a layer, which ends the transfer.
#[test]
fn values_that_drop_at_the_end_of_a_transfer_may_wait_for_another() {
    let pair = Pair::new();
    let (local, remote) = (pair.local(config(8), CONTIGUOUS), pair.remote(config(8), CONTIGUOUS));
    let held = Held::new(&pair, NixlEngineOptions::default());
    let transfer = |block: u32| Transfer::new(&local, &remote).blocks(&[block], &[block]);
    let other = held.manager.submit(transfer(1), ()).unwrap();
    let guard = WaitsForAnother(Some(other));
    let completion = held.manager.submit(transfer(0).layer_by_layer(), guard).unwrap();
    let layers = completion.layers().unwrap();
    drop(completion);
    on_a_thread(move || layers.wait(1)).unwrap();
}

#[test]
fn many_waiting_threads_take_turns_with_the_engine() {
    const THREADS: u32 = 4;
    const ROUNDS: u32 = 50;
    let pair = Pair::new();
    let config: LayoutConfig = config(THREADS * 2);
    let (local, remote) = (pair.local(config, CONTIGUOUS), pair.remote(config, CONTIGUOUS));
    let manager = Arc::new(TransferManager::new([pair.engine(short_requests())]));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (manager, local, remote) = (&manager, &local, &remote);
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let blocks = [thread, thread + THREADS];
                    let write = Transfer::new(local, remote).blocks(&blocks, &blocks);
                    waited(manager.submit(write, ()).unwrap()).result.unwrap();
                }
            });
        }
    });
}

#[test]
fn transfers_end_even_if_no_thread_waits() {
    let pair = Pair::new();
    let manager = TransferManager::new([pair.engine(NixlEngineOptions::default())]);
    let (local, remote) = (pair.local(config(1), CONTIGUOUS), pair.remote(config(1), CONTIGUOUS));
    // The engine's thread is awake by then, about to poll again, or asleep without a timeout.
    for pause in [0, 20, 90, 150, 900, 1_000, 1_100, 30_000].repeat(3) {
        thread::sleep(Duration::from_micros(pause));
        let (guard, ends) = channel::<()>();
        drop(manager.submit(Transfer::new(&local, &remote).blocks(&[0], &[0]), guard).unwrap());
        assert_eq!(ends.recv_timeout(TIMEOUT), Err(RecvTimeoutError::Disconnected), "{pause}");
    }
}
