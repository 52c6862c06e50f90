//! The engines of this crate pass the conformance suite of engines.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use terrane_core::{Alignment, ByteCount, Durability, HostBytes, Requirement};
use terrane_layout::{LayoutBuilder, LayoutConfig, LayoutKind, PhysicalLayout};
use terrane_storage::{
    DiskAllocator, DiskOptions, IoBackend, IoQueueOptions, SystemAllocator, SystemOptions,
};
use terrane_testkit::conformance::copy_engine::{EngineFixture, check_copy_engine, end_of};
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_testkit::recorder::Journal;
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions};
use terrane_transfer::{CopyEngine, DeviceOrder, Endpoint, Transfer, TransferManager};

use crate::support::*;

fn layout(
    config: LayoutConfig,
    kind: LayoutKind,
    allocator: &impl terrane_core::Allocate,
) -> PhysicalLayout {
    LayoutBuilder::new(config).kind(kind).allocate(allocator).unregistered().build().unwrap()
}

struct Host(HostEngineOptions);

impl EngineFixture for Host {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        Arc::new(HostEngine::new(self.0.clone()).unwrap())
    }

    fn ends(&self) -> &[&'static str] {
        &["heap", "pinned", "mapped"]
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        Endpoint::new(match end {
            "heap" => layout(config, kind, &HeapAllocator::system()),
            "pinned" => layout(config, kind, &HeapAllocator::pinned()),
            _ => layout(config, kind, &SystemAllocator::new(SystemOptions::default())),
        })
        .unwrap()
    }

    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        let device = HeapAllocator::simulated_device(0);
        Some(Endpoint::new(layout(config, LayoutKind::FullyContiguous, &device)).unwrap())
    }

    /// It has no device.
    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        None
    }

    fn least_relayouts(&self) -> usize {
        100
    }
}

#[test]
fn the_host_engine_conforms() {
    check_copy_engine(&Host(HostEngineOptions::default()));
}

/// Chunks that end within runs, and non-temporal stores from the first byte on.
#[test]
fn the_host_engine_conforms_with_odd_options() {
    let options = HostEngineOptions {
        threads: 3.try_into().unwrap(),
        chunk: ByteCount::new(1000),
        streaming_from: ByteCount::ZERO,
    };
    check_copy_engine(&Host(options));
}

/// A guard whose drop waits for a signal.
struct WaitsInDrop {
    begun: mpsc::Sender<()>,
    told: mpsc::Receiver<()>,
    timed_out: Arc<AtomicBool>,
}

impl Drop for WaitsInDrop {
    fn drop(&mut self) {
        let _ = self.begun.send(());
        let told = self.told.recv_timeout(Duration::from_secs(20));
        self.timed_out.store(told.is_err(), Ordering::SeqCst);
    }
}

#[test]
fn a_waiting_thread_copies_and_ends_the_transfer_while_the_engine_is_busy() {
    let options = HostEngineOptions {
        threads: NonZeroUsize::MIN,
        chunk: ByteCount::new(100),
        ..HostEngineOptions::default()
    };
    let manager = TransferManager::new([Arc::new(HostEngine::new(options).unwrap()) as _]);
    let ends = [LayoutKind::ALL[0], LayoutKind::ALL[2]].map(|kind| endpoint(config(8), kind));
    let [source, destination] = &ends;
    Pattern::new(3).fill(source).unwrap();
    let (begun, begins) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let timed_out = Arc::new(AtomicBool::new(false));
    let guard = WaitsInDrop { begun, told, timed_out: Arc::clone(&timed_out) };
    // It starts after its completion was dropped, so the engine's only thread drops the guard.
    let gate = source.hold_for_read(&[7]).unwrap();
    let first = Transfer::new(source, destination).blocks(&[0], &[0]).after(&gate.ticket());
    drop(manager.submit(first, guard).unwrap_or_else(|rejected| panic!("refused: {rejected}")));
    drop(gate);
    begins.recv().unwrap();

    let second = Transfer::new(source, destination).blocks(&[1, 2], &[3, 4]);
    drop(manager.submit(second, ()).unwrap().wait().result.unwrap());
    let layers = Transfer::new(source, destination).blocks(&[5], &[6]).layer_by_layer();
    let by_layer = manager.submit(layers, ()).unwrap();
    by_layer.layers().unwrap().wait(3).unwrap();
    drop(by_layer.wait().result.unwrap());
    assert!(!timed_out.load(Ordering::SeqCst), "the transfers waited for the engine's thread");
    tell.send(()).unwrap();
    let found = Pattern::new(3).verify_blocks(destination, &[3, 4, 6], &[1, 2, 5], 0..4);
    found.unwrap().assert_clean("the destination");
}

#[test]
fn waiting_threads_and_threads_of_the_engine_share_each_transfer() {
    let options = HostEngineOptions { chunk: ByteCount::new(70), ..HostEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(HostEngine::new(options).unwrap()) as _]);
    let rounds = if cfg!(miri) { 3 } else { 300 };
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let manager = &manager;
            scope.spawn(move || {
                let kinds = [LayoutKind::ALL[2], LayoutKind::ALL[0]];
                let [source, destination] = &kinds.map(|kind| endpoint(config(8), kind));
                for round in 0..rounds {
                    let pattern = Pattern::new(2 * round + seed);
                    pattern.fill(source).unwrap();
                    let transfer =
                        Transfer::new(source, destination).blocks(&[0, 3, 5], &[7, 1, 2]);
                    drop(manager.submit(transfer, ()).unwrap().wait().result.unwrap());
                    let found = pattern.verify_blocks(destination, &[7, 1, 2], &[0, 3, 5], 0..4);
                    found.unwrap().assert_clean("the destination");
                    assert_unclaimed(destination);
                }
            });
        }
    });
}

struct Disk {
    engine: DiskEngineOptions,
    files: DiskOptions,
    directory: tempfile::TempDir,
}

impl Disk {
    fn new(engine: DiskEngineOptions, files: DiskOptions) -> Self {
        Self { engine, files, directory: tempfile::tempdir().unwrap() }
    }
}

impl EngineFixture for Disk {
    fn engine(&self) -> Arc<dyn CopyEngine> {
        Arc::new(DiskEngine::new(&self.engine).unwrap())
    }

    /// Memory that is aligned to pages, memory that is hardly aligned, files, and files whose
    /// blocks are aligned for direct I/O.
    fn ends(&self) -> &[&'static str] {
        &["mapped", "heap", "file", "aligned file"]
    }

    fn endpoint(&self, end: &str, config: LayoutConfig, kind: LayoutKind) -> Endpoint {
        let files = || DiskAllocator::new(self.directory.path(), self.files).unwrap();
        Endpoint::new(match end {
            "mapped" => layout(config, kind, &SystemAllocator::new(SystemOptions::default())),
            "heap" => layout(config, kind, &HeapAllocator::system()),
            "file" => layout(config, kind, &files()),
            _ => {
                let aligned = config.with_block_alignment(Alignment::PAGE).unwrap();
                layout(aligned, kind, &files())
            }
        })
        .unwrap()
    }

    fn serves(&self, source: &str, destination: &str) -> bool {
        source.contains("file") || destination.contains("file")
    }

    fn unserved(&self, config: LayoutConfig) -> Option<Endpoint> {
        let device = HeapAllocator::simulated_device(0);
        Some(Endpoint::new(layout(config, LayoutKind::FullyContiguous, &device)).unwrap())
    }

    /// It has no device.
    fn unreached(&self) -> Option<(DeviceOrder, Box<dyn Any>)> {
        None
    }

    fn least_relayouts(&self) -> usize {
        120
    }
}

#[test]
fn the_disk_engine_conforms() {
    check_copy_engine(&Disk::new(DiskEngineOptions::default(), DiskOptions::default()));
}

#[test]
fn the_disk_engine_conforms_on_threads() {
    let queue = IoQueueOptions { backend: IoBackend::Threads, ..IoQueueOptions::default() };
    let options = DiskEngineOptions { queue, ..DiskEngineOptions::default() };
    check_copy_engine(&Disk::new(options, DiskOptions::default()));
}

#[test]
fn the_disk_engine_conforms_without_direct_io() {
    let files = DiskOptions { direct: Requirement::Off, ..DiskOptions::default() };
    check_copy_engine(&Disk::new(DiskEngineOptions::default(), files));
}

/// A queue of two, requests of a page, and one buffer for all staged requests.
#[test]
fn the_disk_engine_conforms_when_everything_is_scarce() {
    let options = DiskEngineOptions {
        queue: IoQueueOptions { depth: 2, ..IoQueueOptions::default() },
        request: ByteCount::new(1),
        bounce_buffers: 1,
    };
    check_copy_engine(&Disk::new(options, DiskOptions::default()));
}

/// While completions are handled, requests of other transfers may fill the queue.
#[test]
fn transfers_become_durable_although_the_queue_is_full() {
    let queue = IoQueueOptions { depth: 4, ..IoQueueOptions::default() };
    let options = DiskEngineOptions { queue, ..DiskEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(DiskEngine::new(&options).unwrap()) as _]);
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let shape =
        || shape().num_blocks(512).num_layers(2).page_size(16).inner_dim(512).build().unwrap();
    let file = endpoint_in(&files, shape(), CONTIGUOUS);
    // The memory is not aligned for direct I/O, so its bytes pass through buffers.
    let layer = usize::try_from(shape().total_bytes().get() / 2).unwrap();
    let layers = (0..2).map(|_| HostBytes::from(vec![1_u8; layer]));
    let memory = LayoutBuilder::new(shape()).kind(OUTER_FIRST).adopt_memory(layers);
    let memory = Endpoint::new(memory.unregistered().build().unwrap()).unwrap();
    for _ in 0..20 {
        let submit = |first: u32| {
            let blocks: Vec<u32> = (first..first + 1 + first / 8 % 8).collect();
            let transfer = Transfer::new(&memory, &file).blocks(&blocks, &blocks);
            manager.submit(transfer.durability(Durability::Data), ()).unwrap()
        };
        let completions: Vec<_> = (0..64).map(|number| submit(8 * number)).collect();
        for completion in completions {
            end_of(completion).result.unwrap();
        }
    }
}

/// With one thread. The guard of a third transfer blocks it until both are in its queue.
#[test]
fn a_small_transfer_does_not_wait_for_the_end_of_a_large_one() {
    let options = HostEngineOptions {
        threads: NonZeroUsize::MIN,
        chunk: ByteCount::kib(1),
        ..HostEngineOptions::default()
    };
    let manager = TransferManager::new([Arc::new(HostEngine::new(options).unwrap()) as _]);
    let ends = || endpoint(config(65), CONTIGUOUS);
    let (source, destination, gate) = (ends(), ends(), ends());
    let journal = Journal::new();
    let (release, released) = mpsc::channel();
    let hold = gate.hold_for_read(&[0]).unwrap();
    let first = Transfer::new(&source, &destination).blocks(&[64], &[64]).after(&hold.ticket());
    // No thread waits for this transfer when the gate opens, so its guard drops on the engine's
    // thread.
    drop(manager.submit(first, Keeper(released)).unwrap());
    drop(hold);
    let large: Vec<u32> = (1..64).collect();
    for (name, blocks) in [("large", &large[..]), ("small", &[0])] {
        let transfer = Transfer::new(&source, &destination).blocks(blocks, blocks);
        drop(manager.submit(transfer, journal.note_on_drop(name)).unwrap());
    }
    release.send(()).unwrap();
    drop(manager);
    assert_eq!(journal.lines(), ["small", "large"]);
}

/// Blocks the thread on which it drops until a signal.
struct Keeper(mpsc::Receiver<()>);

impl Drop for Keeper {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}
