//! Memory that the queue registers with io_uring.

use std::fs::File;
use std::os::unix::fs::FileExt;

use terrane_core::{ByteCount, CapabilityStatus, HostAddress, OsError, Reason};
use terrane_storage::{
    IoBackend, IoBuffer, IoMemory, IoQueue, IoQueueOptions, IoRequest, StorageError,
};
use terrane_testkit::mapping::{AddressRange, Mapping};
use terrane_testkit::process::{in_child, in_fork};

use crate::support::{count, drain, skipped, target};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

/// Memory whose parts are the buffers of requests.
struct Buffers(Mapping);

impl Buffers {
    fn new(length: usize) -> Self {
        Self(Mapping::new(length))
    }

    /// A range of the mapping, for a request.
    fn part(&self, begin: usize, length: usize) -> IoBuffer {
        assert!(begin + length <= self.0.length());
        // SAFETY: the range is in the mapping.
        let address = HostAddress::new(unsafe { self.0.address().add(begin) });
        IoBuffer { address, length: ByteCount::from_usize(length) }
    }

    fn whole(&self) -> IoBuffer {
        self.part(0, self.0.length())
    }

    /// The memory, which the caller drops before the mapping.
    fn memory(&self) -> IoMemory {
        // SAFETY: the mapping keeps its pages until it drops.
        unsafe { IoMemory::new(self.whole()) }
    }

    #[expect(clippy::mut_from_ref, reason = "no request is in flight, and no other slice is used")]
    fn bytes(&self, begin: usize, length: usize) -> &mut [u8] {
        assert!(begin + length <= self.0.length());
        let first = self.part(begin, length).address.as_ptr();
        // SAFETY: the range is in the mapping, and initialised. Tests use one slice at a time.
        unsafe { std::slice::from_raw_parts_mut(first, length) }
    }

    /// Checks that the buffers contain the beginning of `content`, one after the other. Returns the
    /// number of their bytes.
    #[track_caller]
    fn assert_filled(&self, buffers: &[IoBuffer], content: &[u8]) -> usize {
        let mut at = 0;
        for buffer in buffers {
            let begin = buffer.address.get() - self.whole().address.get();
            let length = buffer.length.to_usize();
            let found = self.bytes(usize::try_from(begin).unwrap(), length);
            assert!(found == &content[at..at + length], "{begin}");
            at += length;
        }
        at
    }
}

/// A queue on io_uring that registers at most `limit` bytes; `None` if this process may not register
/// as many.
fn queue_of(test: &str, limit: usize) -> Option<IoQueue> {
    let mut trial = table_of(test, limit)?;
    match trial.try_registration(ByteCount::from_usize(limit)).unwrap() {
        CapabilityStatus::Granted => table_of(test, limit),
        other => {
            skipped(test, format!("registered buffers: {other:?}"));
            None
        }
    }
}

/// A queue on io_uring with a table for at most `limit` bytes; `None` if the machine has none.
fn table_of(test: &str, limit: usize) -> Option<IoQueue> {
    let registered = ByteCount::from_usize(limit);
    let options = IoQueueOptions {
        depth: 8,
        backend: IoBackend::IoUring,
        registered,
        ..IoQueueOptions::default()
    };
    let queue = match IoQueue::new(&options) {
        Ok(queue) => queue,
        Err(error) => {
            skipped(test, error);
            return None;
        }
    };
    match queue.registration().status() {
        CapabilityStatus::Granted => Some(queue),
        other => {
            skipped(test, format!("registered buffers: {other:?}"));
            None
        }
    }
}

/// Registers a memory of less than a chunk by using all of it once.
fn register(queue: &mut IoQueue, memory: &IoMemory, mapping: &Buffers) {
    queue.note_use(memory, &[mapping.whole()]);
    if memory.registered() != memory.length() {
        assert_eq!(memory.registered(), ByteCount::ZERO);
    }
}

fn execute(queue: &mut IoQueue, request: &IoRequest<'_>) {
    // SAFETY: the callers keep the memory and the file until the return.
    unsafe { queue.submit(request) }.unwrap();
    assert_eq!(drain(queue)[0].outcome, Ok(()));
}

fn pattern(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|n| ((n * 31 + n / 251 + seed) % 256).to_le_bytes()[0]).collect()
}

fn file_of(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

/// The bytes that the kernel has pinned for this process.
fn pinned_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPin:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn registered_memory_has_the_bytes_of_its_requests() {
    let test = "registered::registered_memory_has_the_bytes_of_its_requests";
    let Some(mut queue) = queue_of(test, 16 * MIB) else { return };
    let mapping = Buffers::new(2 * MIB);
    let memory = mapping.memory();
    register(&mut queue, &memory, &mapping);
    assert_eq!(memory.registered(), memory.length());
    let content = pattern(MIB, 1);
    let file = file_of(&content);
    // One range, then several of them, in another order than in memory.
    let one = [mapping.part(5 * PAGE, 100_000)];
    let several = [(9, 7000), (700, 100), (300, 50_000), (450, 42_900)]
        .map(|(page, length)| mapping.part(page * PAGE / 2, length));
    for buffers in [&one[..], &several[..]] {
        mapping.bytes(0, 2 * MIB).fill(0xee);
        let request = IoRequest::read(1, target(&file), count(4321), buffers);
        execute(&mut queue, &request.within(Some(&memory)));
        let at = 4321 + mapping.assert_filled(buffers, &content[4321..]);
        assert_eq!(
            mapping.bytes(0, 2 * MIB).iter().filter(|&&byte| byte != 0xee).count() / 1000,
            {
                let changed = content[4321..at].iter().filter(|&&byte| byte != 0xee).count();
                changed / 1000
            }
        );
        let copy = tempfile::tempfile().unwrap();
        let request = IoRequest::write(2, target(&copy), count(7), buffers);
        execute(&mut queue, &request.within(Some(&memory)));
        let mut written = vec![0; at - 4321];
        copy.read_exact_at(&mut written, 7).unwrap();
        assert!(written == content[4321..at]);
    }
}

/// The second chunk of the memory begins in the middle of the request.
#[test]
fn a_request_may_cross_the_end_of_a_chunk() {
    let test = "registered::a_request_may_cross_the_end_of_a_chunk";
    let Some(mut queue) = queue_of(test, 256 * MIB) else { return };
    let (chunk, length) = (64 * MIB, 80 * MIB);
    let mapping = Buffers::new(length);
    let memory = mapping.memory();
    for (begin, steps) in [(0, 16), (chunk, 4)] {
        for step in 0..steps {
            queue.note_use(&memory, &[mapping.part(begin + step * 4 * MIB, 4 * MIB)]);
        }
    }
    assert_eq!(memory.registered(), memory.length());
    let content = pattern(3 * MIB, 5);
    let file = file_of(&content);
    let across = [mapping.part(chunk - MIB, 3 * MIB)];
    let apart = [mapping.part(chunk, 2 * MIB), mapping.part(chunk - MIB, MIB)];
    let far = [mapping.part(length - MIB, MIB), mapping.part(0, MIB), mapping.part(MIB, MIB)];
    for buffers in [&across[..], &apart[..], &far[..]] {
        let request = IoRequest::read(1, target(&file), count(0), buffers).within(Some(&memory));
        execute(&mut queue, &request);
        mapping.assert_filled(buffers, &content);
    }
}

/// A kernel that kept using the pages of the first mapping would leave the second one unchanged.
#[test]
fn other_memory_at_the_same_addresses_gets_its_own_bytes() {
    let test = "registered::other_memory_at_the_same_addresses_gets_its_own_bytes";
    let Some(mut queue) = queue_of(test, 16 * MIB) else { return };
    let range = AddressRange::new(MIB);
    for round in 0..20 {
        let mapping = Buffers(range.map(None));
        let memory = mapping.memory();
        let content = pattern(MIB, round);
        let file = file_of(&content);
        let buffers = [mapping.whole()];
        let request = IoRequest::read(1, target(&file), count(0), &buffers).within(Some(&memory));
        for _ in 0..2 {
            mapping.bytes(0, MIB).fill(0);
            execute(&mut queue, &request);
            assert!(mapping.bytes(0, MIB) == content, "round {round}");
        }
        assert_eq!(memory.registered(), count(MIB as u64));
        let clone = memory.clone();
        drop(memory);
        assert_eq!(clone.registered(), count(MIB as u64));
    }
}

#[test]
fn small_uses_register_nothing() {
    let test = "registered::small_uses_register_nothing";
    let Some(mut queue) = queue_of(test, 16 * MIB) else { return };
    let mapping = Buffers::new(MIB);
    let memory = mapping.memory();
    for _ in 0..15 {
        queue.note_use(&memory, &[mapping.part(0, MIB / 16)]);
        assert_eq!(memory.registered(), ByteCount::ZERO);
    }
    queue.note_use(&memory, &[mapping.part(0, MIB / 16)]);
    assert_eq!(memory.registered(), memory.length());
}

#[test]
fn pages_are_registered_once_for_requests_of_all_spans() {
    let test = "registered::pages_are_registered_once_for_requests_of_all_spans";
    let Some(mut queue) = queue_of(test, 64 * MIB) else { return };
    let mapping = Buffers::new(16 * MIB);
    let memory = mapping.memory();
    for part in [1, 2, 8, 16] {
        for _ in 0..2 * 16 / part {
            queue.note_use(&memory, &[mapping.part(0, part * MIB)]);
        }
        assert_eq!(memory.registered(), memory.length());
    }
}

#[test]
fn the_limit_is_kept_and_room_is_used_again() {
    let test = "registered::the_limit_is_kept_and_room_is_used_again";
    let Some(mut queue) = queue_of(test, 3 * MIB) else { return };
    let registration = queue.registration();
    let mappings = [(); 4].map(|()| Buffers::new(MIB));
    let mut memories: Vec<IoMemory> = mappings.iter().map(Buffers::memory).collect();
    let registered = |memories: &[IoMemory]| -> Vec<bool> {
        memories.iter().map(|memory| !memory.registered().is_zero()).collect()
    };
    for (memory, mapping) in memories.iter().zip(&mappings) {
        register(&mut queue, memory, mapping);
    }
    assert_eq!(registered(&memories), [true, true, true, false]);
    assert!(!registration.has_room_for(ByteCount::new(1)));
    assert_eq!(registration.status(), CapabilityStatus::Granted);
    drop(memories.remove(0));
    assert!(registration.has_room_for(ByteCount::mib(1)));
    register(&mut queue, &memories[2], &mappings[3]);
    assert_eq!(registered(&memories), [true, true, true]);
    // Nothing is registered without a limit of bytes.
    let Ok(mut none) =
        IoQueue::new(&IoQueueOptions { registered: ByteCount::ZERO, ..IoQueueOptions::default() })
    else {
        return;
    };
    let other = mappings[0].memory();
    register(&mut none, &other, &mappings[0]);
    assert_eq!(other.registered(), ByteCount::ZERO);
    assert_eq!(none.registration().status(), CapabilityStatus::NotTried);
}

#[test]
fn a_full_table_registers_no_more_until_memory_drops() {
    let test = "registered::a_full_table_registers_no_more_until_memory_drops";
    let Some(mut queue) = queue_of(test, 64 * MIB) else { return };
    let mapping = Buffers::new(4100 * PAGE);
    let part = |number: usize| mapping.part(number * PAGE, PAGE);
    // SAFETY: the mapping keeps its pages until it drops, which is after the memory.
    let mut memories: Vec<IoMemory> =
        (0..4100).map(|number| unsafe { IoMemory::new(part(number)) }).collect();
    for (number, memory) in memories.iter().enumerate() {
        queue.note_use(memory, &[part(number)]);
    }
    let registered = memories.iter().filter(|memory| !memory.registered().is_zero()).count();
    assert_eq!(registered, 4096);
    let content = pattern(PAGE, 3);
    let file = file_of(&content);
    let last = [part(4099)];
    for _ in 0..2 {
        mapping.bytes(4099 * PAGE, PAGE).fill(0);
        let request = IoRequest::read(1, target(&file), count(0), &last);
        execute(&mut queue, &request.within(memories.last()));
        assert!(mapping.bytes(4099 * PAGE, PAGE) == content);
        drop(memories.remove(0));
    }
    assert_eq!(memories.last().unwrap().registered(), ByteCount::from_usize(PAGE));
}

#[test]
fn pages_are_unpinned_with_the_memory_and_with_the_queue() {
    let test = "registered::pages_are_unpinned_with_the_memory_and_with_the_queue";
    in_child(test, || {
        let Some(mut queue) = queue_of(test, 64 * MIB) else { return };
        let mappings = [(); 2].map(|()| Buffers::new(8 * MIB));
        let [first, second] = [0, 1].map(|number: usize| mappings[number].memory());
        assert_eq!(pinned_kib(), 0);
        register(&mut queue, &first, &mappings[0]);
        register(&mut queue, &second, &mappings[1]);
        assert_eq!(pinned_kib(), 16 << 10);
        drop(first);
        assert_eq!(pinned_kib(), 8 << 10);
        drop(queue);
        assert_eq!(pinned_kib(), 0);
        assert_eq!(second.registered(), ByteCount::ZERO);
        let Some(mut queue) = queue_of(test, 64 * MIB) else { return };
        register(&mut queue, &second, &mappings[1]);
        assert_eq!((pinned_kib(), second.registered()), (8 << 10, ByteCount::mib(8)));
    });
}

/// Removes the capability that exempts root from the limit of locked memory.
fn obey_memory_lock_limit(bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: the structure outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
    /// `_LINUX_CAPABILITY_VERSION_3`, for this thread: no capability at all.
    const HEADER: [u32; 2] = [0x2008_0522, 0];
    let none = [0_u32; 6];
    // SAFETY: the kernel reads both structures, which outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_capset, HEADER.as_ptr(), none.as_ptr()) };
    assert_eq!(result, 0);
}

#[test]
fn a_limit_on_locked_memory_is_reported_and_requests_continue() {
    let test = "registered::a_limit_on_locked_memory_is_reported_and_requests_continue";
    in_child(test, || {
        obey_memory_lock_limit(MIB as u64);
        let Some(mut queue) = table_of(test, 64 * MIB) else { return };
        let mapping = Buffers::new(4 * MIB);
        let memory = mapping.memory();
        register(&mut queue, &memory, &mapping);
        assert_eq!(memory.registered(), ByteCount::ZERO);
        let reason = Reason::Os(OsError::new("io_uring_register", libc::ENOMEM));
        let registration = queue.registration();
        assert_eq!(registration.status(), CapabilityStatus::Refused(reason));
        assert!(!registration.has_room_for(ByteCount::new(1)));
        let content = pattern(4 * MIB, 2);
        let file = file_of(&content);
        let buffers = [mapping.whole()];
        let request = IoRequest::read(1, target(&file), count(0), &buffers);
        execute(&mut queue, &request.within(Some(&memory)));
        assert!(mapping.bytes(0, 4 * MIB) == content);
    });
}

#[test]
fn mapped_files_are_refused_and_other_memory_is_not() {
    let test = "registered::mapped_files_are_refused_and_other_memory_is_not";
    let Some(mut queue) = queue_of(test, 64 * MIB) else { return };
    let content = pattern(MIB, 4);
    let (file, mapped) = (file_of(&content), file_of(&[0; MIB]));
    let mapping = Buffers(AddressRange::new(MIB).map(Some(&mapped)));
    let memory = mapping.memory();
    let buffers = [mapping.whole()];
    for _ in 0..2 {
        mapping.bytes(0, MIB).fill(0);
        let request = IoRequest::read(1, target(&file), count(0), &buffers);
        execute(&mut queue, &request.within(Some(&memory)));
        assert!(mapping.bytes(0, MIB) == content);
    }
    // A file in memory (tmpfs) is accepted.
    if memory.registered().is_zero() {
        assert!(matches!(queue.registration().status(), CapabilityStatus::Refused(Reason::Os(_))));
    }
    let other = Buffers::new(MIB);
    let anonymous = other.memory();
    register(&mut queue, &anonymous, &other);
    assert_eq!(anonymous.registered(), anonymous.length());
}

#[test]
fn threads_register_nothing() {
    let options = IoQueueOptions { backend: IoBackend::Threads, ..IoQueueOptions::default() };
    let mut queue = IoQueue::new(&options).unwrap();
    let mapping = Buffers::new(MIB);
    let memory = mapping.memory();
    register(&mut queue, &memory, &mapping);
    assert_eq!(memory.registered(), ByteCount::ZERO);
    let reason = Reason::Needs("io_uring");
    assert_eq!(queue.registration().status(), CapabilityStatus::Refused(reason));
    let file = file_of(&pattern(MIB, 9));
    let buffers = [mapping.whole()];
    let request = IoRequest::read(1, target(&file), count(0), &buffers).within(Some(&memory));
    execute(&mut queue, &request);
    assert!(mapping.bytes(0, MIB) == pattern(MIB, 9));
}

/// The child's drop of the memory must not unregister what the parent uses.
#[test]
fn a_forked_process_leaves_the_parents_buffers_registered() {
    let test = "registered::a_forked_process_leaves_the_parents_buffers_registered";
    in_child(test, || {
        let Some(mut queue) = queue_of(test, 64 * MIB) else { return };
        let mapping = Buffers::new(MIB);
        let memory = mapping.memory();
        register(&mut queue, &memory, &mapping);
        assert_eq!(pinned_kib(), 1 << 10);
        in_fork(|| {
            assert_eq!(memory.registered(), ByteCount::ZERO);
            // The child shares the ring, whose table is the parent's.
            let own = mapping.memory();
            queue.note_use(&own, &[mapping.whole()]);
            assert_eq!(own.registered(), ByteCount::ZERO);
            let refused = queue.try_registration(ByteCount::mib(1));
            assert!(matches!(refused, Err(StorageError::Forked(_))));
            // SAFETY: the forked process exits without a drop of its own `memory`.
            drop(unsafe { std::ptr::read(&raw const memory) });
            assert!(matches!(queue.flush(), Err(StorageError::Forked(_))));
        });
        assert_eq!(pinned_kib(), 1 << 10);
    });
}
