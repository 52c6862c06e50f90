//! Helpers of several tests.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use terrane_core::{ByteCount, Capability, CapabilityStatus, FileIdentity, HostAddress};
use terrane_storage::{IoBackend, IoBuffer, IoCompletion, IoFile, IoQueue, IoQueueOptions};

/// Prints the name of a test that could not run, and the reason.
pub fn skipped(test: &str, reason: impl std::fmt::Display) {
    eprintln!("skipped: {test}: {reason}");
}

/// A queue of `depth` on each backend that the machine has, io_uring first.
pub fn queues(test: &str, depth: u32) -> Vec<IoQueue> {
    let options = |backend| IoQueueOptions { depth, backend, ..IoQueueOptions::default() };
    let mut queues = Vec::new();
    match IoQueue::new(&options(IoBackend::IoUring)) {
        Ok(queue) => queues.push(queue),
        Err(error) => skipped(&format!("{test} on io_uring"), error),
    }
    queues.push(IoQueue::new(&options(IoBackend::Threads)).unwrap());
    queues
}

pub fn uses_io_uring(queue: &IoQueue) -> bool {
    queue.capabilities().status(&Capability::IoUring) == Some(&CapabilityStatus::Granted)
}

pub fn target(file: &File) -> IoFile {
    let metadata = file.metadata().unwrap();
    let identity = FileIdentity { file_system: metadata.dev(), inode: metadata.ino() };
    IoFile { descriptor: file.as_raw_fd(), identity }
}

pub fn buffer(bytes: &mut [u8]) -> IoBuffer {
    IoBuffer {
        address: HostAddress::new(NonNull::from(&mut *bytes).cast::<u8>()),
        length: ByteCount::from_usize(bytes.len()),
    }
}

/// Waits until nothing is in flight.
pub fn drain(queue: &mut IoQueue) -> Vec<IoCompletion> {
    let mut completions = Vec::new();
    while queue.in_flight() > 0 {
        queue.wait(None, &mut completions).unwrap();
    }
    completions
}

pub fn count(bytes: u64) -> ByteCount {
    ByteCount::new(bytes)
}

/// The resources of a process: open descriptors, mappings and threads.
#[derive(Debug, PartialEq, Eq)]
pub struct ResourceUsage {
    pub descriptors: usize,
    pub mapped_kib: usize,
    pub threads: usize,
}

impl ResourceUsage {
    pub fn now() -> Self {
        let entries = |path| std::fs::read_dir(path).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        // The C library reserves inaccessible address space for its threads.
        let ours = |line: &&str| !line.contains("[heap]") && !line.contains(" ---p ");
        let sizes = maps.lines().filter(ours).map(|line| {
            let (begin, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
            let address = |digits| usize::from_str_radix(digits, 16).unwrap();
            (address(end) - address(begin)) >> 10
        });
        let mapped_kib = sizes.sum();
        Self {
            descriptors: entries("/proc/self/fd"),
            mapped_kib,
            threads: entries("/proc/self/task"),
        }
    }
}

/// Asserts that `body` uses no more resources after further runs than after its first run.
pub fn assert_leaks_nothing(what: &str, mut body: impl FnMut()) {
    // The first run fills caches: of the allocator, and of the stacks of threads.
    body();
    body();
    let before = ResourceUsage::now();
    for _ in 0..8 {
        body();
    }
    // Eight leaks of the smallest mapped region, 1 MiB, exceed this.
    let is_as_before = |after: &ResourceUsage| {
        after.descriptors <= before.descriptors
            && after.threads <= before.threads
            && after.mapped_kib <= before.mapped_kib + 4096
    };
    // A joined thread can be listed for a moment longer.
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_as_before(&ResourceUsage::now()) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let after = ResourceUsage::now();
    assert!(is_as_before(&after), "{what} leaks: {before:?} became {after:?}");
}

/// The number of entries of a directory.
pub fn entries(directory: &Path) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

/// Ignores the signal of the limit on file sizes.
pub fn ignore_limit_signal() {
    // SAFETY: ignoring a signal accesses no memory.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Limits the size of the files that this process writes.
pub fn limit_file_size(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the structure outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
}
