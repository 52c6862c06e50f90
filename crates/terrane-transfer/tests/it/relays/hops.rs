//! Hops: explained, durable, direct, of several relays at once, and of nested relays.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Durability};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_testkit::conformance::copy_engine::end_of;
use terrane_testkit::engine::SimulatedEngine;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::Pattern;
use terrane_testkit::process::in_child;
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{
    CopyEngine, CopyJob, Declined, DeviceOrder, Quote, Transfer, TransferError, TransferManager,
    TransferOptions, TransferPlan,
};

use super::{BLOCK, slots, to_device, to_system, until};
use crate::support::*;

#[test]
fn both_hops_are_explained_and_the_slower_one_is_predicted() {
    let millis = Duration::from_millis;
    let device = Arc::new(SimulatedEngine::new(to_device().predicting(millis(2))));
    let system = Arc::new(SimulatedEngine::new(to_system().predicting(millis(5))));
    let relay = RelayEngine::new(device, system, HeapAllocator::pinned(), &slots(3, BLOCK));
    let manager = TransferManager::new([Arc::new(relay.unwrap()) as _]);
    let source = endpoint_in(&HeapAllocator::simulated_device(0), config(8), OUTER_FIRST);
    let destination = endpoint(config(8), CONTIGUOUS);
    let transfer = |blocks: &[u32]| {
        Transfer::new(&source, &destination)
            .blocks(blocks, blocks)
            .device_order(DeviceOrder::AlreadySynchronised)
    };
    let explained = manager.explain(&transfer(&[0, 1, 2, 3])).unwrap();
    assert_eq!(explained.path(), "simulated copy by device, then simulated copy by system");
    assert!(
        explained.reason().contains("pinned memory, in 4 chunks of up to 480 B"),
        "{explained}"
    );
    assert_eq!(explained.predicted, millis(2 + 5 + 3 * 5));
    assert_eq!(manager.explain(&transfer(&[0])).unwrap().predicted, millis(7));
}

/// Records the options and the bytes of all jobs.
#[derive(Debug)]
struct Noting {
    inner: Arc<dyn CopyEngine>,
    jobs: Mutex<Vec<(TransferOptions, ByteCount)>>,
}

// SAFETY: the inner engine executes the jobs.
unsafe impl CopyEngine for Noting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.inner.quote(plan, options)
    }
    fn submit(&self, job: CopyJob) {
        self.jobs.lock().unwrap().push((job.options().clone(), job.plan().bytes()));
        self.inner.submit(job);
    }
}

/// A disk engine that keeps the jobs without bytes, which make files durable, until the test ends
/// them.
#[derive(Debug)]
struct KeepsDurability {
    inner: Arc<DiskEngine>,
    kept: Mutex<Vec<CopyJob>>,
}

// SAFETY: the disk engine copies all bytes.
unsafe impl CopyEngine for KeepsDurability {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn quote(&self, plan: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        self.inner.quote(plan, options)
    }
    fn submit(&self, job: CopyJob) {
        if job.plan().bytes().is_zero() {
            self.kept.lock().unwrap().push(job);
        } else {
            self.inner.submit(job);
        }
    }
}

/// The time that this process has used its processors.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the value.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) }, 0);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

#[test]
fn a_cancelled_transfer_past_its_deadline_waits_without_spinning() {
    let test = "relays::hops::a_cancelled_transfer_past_its_deadline_waits_without_spinning";
    in_child(test, || {
        let directory = tempfile::tempdir().unwrap();
        let inner = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
        let disk = Arc::new(KeepsDurability { inner, kept: Mutex::default() });
        let device = Arc::new(SimulatedEngine::new(to_device()));
        let options = slots(3, BLOCK);
        let relay = RelayEngine::new(device, disk.clone(), HeapAllocator::pinned(), &options);
        let manager = TransferManager::new([Arc::new(relay.unwrap()) as _]);
        let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
        let file = endpoint_in(&files, config(4), CONTIGUOUS);
        let source = endpoint_in(&HeapAllocator::simulated_device(0), config(4), BLOCK_FIRST);
        let deadline = Instant::now() + Duration::from_secs(2);
        let transfer = Transfer::new(&source, &file)
            .blocks(&[0, 1, 2, 3], &[3, 1, 0, 2])
            .device_order(DeviceOrder::AlreadySynchronised)
            .durability(Durability::Full)
            .deadline(deadline);
        let completion = manager.submit(transfer, ()).unwrap();
        until(|| !disk.kept.lock().unwrap().is_empty());
        completion.ticket().cancel();
        thread::sleep(deadline.saturating_duration_since(Instant::now()));
        let before = processor_time();
        thread::sleep(Duration::from_millis(400));
        let used = processor_time() - before;
        assert!(used < Duration::from_millis(200), "{used:?} in 400 ms");
        disk.kept.lock().unwrap().drain(..).for_each(|job| job.finish(Ok(())));
        let error = end_of(completion).result.unwrap_err();
        assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error:?}");
    });
}

#[test]
fn files_are_made_durable_once_when_all_is_written() {
    let directory = tempfile::tempdir().unwrap();
    for (stated, asked) in [
        (Durability::None, Durability::Full),
        (Durability::Data, Durability::None),
        (Durability::None, Durability::None),
    ] {
        let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
        let disk = Arc::new(Noting { inner: disk, jobs: Mutex::default() });
        let device = Arc::new(SimulatedEngine::new(to_device()));
        let relay =
            RelayEngine::new(device, disk.clone(), HeapAllocator::pinned(), &slots(3, BLOCK));
        let manager = TransferManager::new([Arc::new(relay.unwrap()) as _]);
        let options = DiskOptions { durability: stated, ..DiskOptions::default() };
        let files = DiskAllocator::new(directory.path(), options).unwrap();
        let file = endpoint_in(&files, config(4), CONTIGUOUS);
        let source = endpoint_in(&HeapAllocator::simulated_device(0), config(4), BLOCK_FIRST);
        let transfer = Transfer::new(&source, &file)
            .blocks(&[0, 1, 2, 3], &[3, 1, 0, 2])
            .device_order(DeviceOrder::AlreadySynchronised)
            .durability(asked);
        run(&manager, transfer);
        let mut jobs = std::mem::take(&mut *disk.jobs.lock().unwrap());
        if stated.max(asked) > Durability::None {
            let (last, bytes) = jobs.pop().unwrap();
            assert_eq!((last.durability, bytes), (asked, ByteCount::ZERO));
            assert!(!last.more_follows);
        }
        assert_eq!(jobs.len(), 4);
        assert!(jobs.iter().all(|(options, _)| options.more_follows));
    }
}

/// Pages in memory and in the file: the disk's hop uses direct I/O, as it does without a relay.
#[test]
fn files_are_accessed_with_direct_io() {
    let directory = tempfile::tempdir().unwrap();
    let config = shape().num_blocks(8).page_size(16).inner_dim(1024).build().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = endpoint_in(&files, config, CONTIGUOUS);
    let device = endpoint_in(&HeapAllocator::simulated_device(0), config, OUTER_FIRST);
    let system = endpoint_in(&SystemAllocator::new(SystemOptions::default()), config, CONTIGUOUS);
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let by_itself = TransferManager::new([disk.clone() as _]);
    let explained =
        by_itself.explain(&Transfer::new(&system, &file).blocks(&[0, 1], &[0, 1])).unwrap();
    if explained.path() != "direct vectored" {
        eprintln!("skipped: files_are_accessed_with_direct_io: {}", explained.reason());
        return;
    }
    let engine = Arc::new(SimulatedEngine::new(to_device()));
    let relay =
        RelayEngine::new(engine, disk, HeapAllocator::pinned(), &RelayOptions::default()).unwrap();
    let manager = TransferManager::new([Arc::new(relay) as _]);
    let order = DeviceOrder::AlreadySynchronised;
    for (from, to) in [(&device, &file), (&file, &device)] {
        let transfer = Transfer::new(from, to).blocks(&[0, 1], &[0, 1]).device_order(order.clone());
        let explained = manager.explain(&transfer).unwrap();
        assert!(explained.path().contains("direct vectored by disk"), "{explained}");
    }
}

/// Two relays that share their engines copy blocks in both directions, through one slot, two and
/// three, on several threads. If chunks waited for each other's slots, the test would not end.
#[test]
fn opposite_directions_do_not_deadlock() {
    const THREADS: u32 = 4;
    for count in 1..=3 {
        let device = Arc::new(SimulatedEngine::new(to_device().reordering(count)));
        let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
        let options = slots(usize::try_from(count).unwrap(), BLOCK / 2);
        let relay = || {
            let pinned = HeapAllocator::pinned();
            Arc::new(RelayEngine::new(device.clone(), host.clone(), pinned, &options).unwrap())
        };
        let managers = [relay(), relay()].map(|relay| TransferManager::new([relay as _]));
        let here = endpoint_in(&HeapAllocator::simulated_device(0), config(16), OUTER_FIRST);
        let there = endpoint(config(16), CONTIGUOUS);
        Pattern::new(3).fill(&here).unwrap();
        thread::scope(|scope| {
            for number in 0..THREADS {
                let (managers, here, there) = (&managers, &here, &there);
                scope.spawn(move || {
                    let blocks: Vec<u32> = (number * 4..number * 4 + 4).collect();
                    let manager = &managers[usize::try_from(number % 2).unwrap()];
                    let mut last = None;
                    let mut all = Vec::new();
                    for round in 0..16 {
                        let ends = if round % 2 == 0 { (here, there) } else { (there, here) };
                        let mut transfer = Transfer::new(ends.0, ends.1)
                            .blocks(&blocks, &blocks)
                            .device_order(DeviceOrder::AlreadySynchronised);
                        if let Some(last) = &last {
                            transfer = transfer.after(last);
                        }
                        let completion = manager.submit(transfer, ()).unwrap();
                        last = Some(completion.ticket());
                        all.push(completion);
                    }
                    for completion in all {
                        end_of(completion).result.unwrap();
                    }
                });
            }
        });
        drop(managers);
        Pattern::new(3).verify(&here).unwrap().assert_clean("after all rounds");
        Pattern::new(3).verify(&there).unwrap().assert_clean("after all rounds");
    }
}

/// A relay is an engine, so each hop may itself be relayed.
#[test]
fn a_relay_may_be_a_hop_of_another() {
    for slot_bytes in [4 * BLOCK, BLOCK / 2, BLOCK / 4] {
        check_nested_relay(&slots(2, slot_bytes), &slots(2, BLOCK / 2));
    }
}

/// All parts of a transfer share its ticket, and each inner part waits in the inner relay.
#[test]
fn a_cancellation_ends_all_parts_that_wait_in_an_inner_relay() {
    let device = Arc::new(SimulatedEngine::new(to_device()));
    device.hold();
    let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let hop = Arc::clone(&device) as _;
    let inner = RelayEngine::new(hop, host, HeapAllocator::pinned(), &slots(2, BLOCK)).unwrap();
    let inner = Arc::new(inner);
    let both = &slots(8, BLOCK);
    let outer =
        RelayEngine::new(Arc::clone(&inner) as _, disk, HeapAllocator::system(), both).unwrap();
    let outer = Arc::new(outer);
    let manager = TransferManager::new([Arc::clone(&outer) as _]);
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = endpoint_in(&files, config(8), CONTIGUOUS);
    let here = endpoint_in(&HeapAllocator::simulated_device(0), config(8), OUTER_FIRST);
    let submit = |blocks: &[u32]| {
        let transfer = Transfer::new(&here, &file).blocks(blocks, blocks);
        manager.submit(transfer.device_order(DeviceOrder::AlreadySynchronised), ()).unwrap()
    };
    let before = submit(&[6, 7]);
    until(|| inner.slots().held == 2);
    let waiting = submit(&[0, 1]);
    until(|| outer.slots().held == 4);
    // The inner relay takes the parts in. Without this time, it sees the cancellation as it does so.
    thread::sleep(Duration::from_millis(50));
    waiting.cancel();
    let error = end_of(waiting).result.unwrap_err();
    assert!(matches!(error, TransferError::Cancelled { .. }), "{error}");
    device.release_all();
    end_of(before).result.unwrap();
}

fn check_nested_relay(options: &RelayOptions, inner_options: &RelayOptions) {
    let device = Arc::new(SimulatedEngine::new(to_device()));
    let host = Arc::new(HostEngine::new(HostEngineOptions::default()).unwrap());
    let disk = Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap());
    let inner = RelayEngine::new(device, host, HeapAllocator::pinned(), inner_options).unwrap();
    let outer = RelayEngine::new(Arc::new(inner), disk, HeapAllocator::system(), options).unwrap();
    let manager = TransferManager::new([Arc::new(outer) as _]);
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let file = endpoint_in(&files, config(8), CONTIGUOUS);
    let here = endpoint_in(&HeapAllocator::simulated_device(0), config(8), OUTER_FIRST);
    Pattern::new(5).fill(&here).unwrap();
    let blocks: Vec<u32> = (0..8).collect();
    let transfer = Transfer::new(&here, &file).blocks(&blocks, &blocks);
    run(&manager, transfer.device_order(DeviceOrder::AlreadySynchronised));
    Pattern::new(5).verify(&file).unwrap().assert_clean("through two slots");
}
