//! Every length and alignment, and nothing outside the block.

use proptest::collection::vec;
use proptest::prelude::*;
use terrane_core::checksum::crc64;
use terrane_storage::{DiskOptions, IoBackend};

use super::*;

const PAGE: usize = 4096;

/// Writes blocks of `lengths` at once, and reads all of them back, with guards around each.
fn round_trip(slabs: &Slabs, lengths: &[usize], skew: usize) {
    let mut sources: Vec<Guarded> = Vec::new();
    for &length in lengths {
        let mut source = Guarded::new(&[(skew, length)]);
        source.fill(&pattern(length as u64, length));
        sources.push(source);
    }
    let results = Arc::new(Results::default());
    let writes = sources.iter_mut().enumerate().map(|(index, source)| {
        let write = request(slot(index), source.buffers(), SlabDirection::Write);
        NewRequest { index, ..write }.to(&results)
    });
    let writes = writes.collect();
    // SAFETY: the memory is kept until all requests have ended.
    unsafe { slabs.submit(writes) };
    let mut sums = vec![0; lengths.len()];
    for (index, result) in results.take(lengths.len()) {
        let done = result.unwrap();
        assert_eq!(done.bytes, lengths[index] as u64);
        assert_eq!(done.checksum, crc64(&pattern(done.bytes, lengths[index])));
        sums[index] = done.checksum;
    }
    // Another skew than that of the write.
    let mut targets: Vec<Guarded> =
        lengths.iter().map(|&length| Guarded::new(&[(PAGE - 1 - skew, length)])).collect();
    let reads = targets.iter_mut().enumerate().map(|(index, target)| {
        let direction = SlabDirection::Read { checksum: sums[index] };
        NewRequest { index, ..request(slot(index), target.buffers(), direction) }.to(&results)
    });
    let reads = reads.collect();
    // SAFETY: as above.
    unsafe { slabs.submit(reads) };
    for (index, result) in results.take(lengths.len()) {
        assert_eq!(result.unwrap().bytes, lengths[index] as u64);
        assert_eq!(targets[index].content(), pattern(lengths[index] as u64, lengths[index]));
        targets[index].check_guards();
        sources[index].check_guards();
    }
}

#[test]
fn every_length_from_a_byte_to_three_pages_comes_back_and_touches_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = open_one(folder.path(), group(3 * PAGE as u64, 1024), &SlabOptions::default());
    let lengths: Vec<usize> = (1..=3 * PAGE).collect();
    for (number, lengths) in lengths.chunks(1024).enumerate() {
        round_trip(&slabs, lengths, [0, 1, 512, PAGE - 1][number % 4]);
    }
    let near: Vec<usize> = (1..=3)
        .flat_map(|pages| pages * PAGE - 2..=pages * PAGE + 2)
        .filter(|&l| l <= 3 * PAGE)
        .collect();
    for skew in [0, 1, 16, 511, 512, 2048, PAGE - 1] {
        round_trip(&slabs, &near, skew);
    }
}

#[test]
fn blocks_of_many_requests_come_back() {
    for backend in [IoBackend::Auto, IoBackend::Threads] {
        let folder = tempfile::tempdir().unwrap();
        let request = ByteCount::mib(1);
        let options = SlabOptions { request, backend, depth: 8, ..SlabOptions::default() };
        let slabs = open_one(folder.path(), group((5 << 20) + 77, 4), &options);
        for skew in [0, 3, 512] {
            round_trip(&slabs, &[(5 << 20) + 77, 5 << 20, (4 << 20) - 1, (1 << 20) + 1], skew);
        }
    }
}

#[test]
fn a_large_block_is_written_by_one_request_and_read_by_requests_of_512_kib() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = open_one(folder.path(), group(4 << 20, 1), &SlabOptions::default());
    let content = vec![7; 4 << 20];
    let checksum = write(&slabs, 0, &content);
    assert_eq!(slabs.io_numbers()[2], 1);
    assert_eq!(read(&slabs, 0, content.len(), checksum).unwrap(), content);
    assert_eq!(slabs.io_numbers()[2], 1 + 8);
}

#[test]
fn the_page_cache_serves_files_without_direct_io() {
    let folder = tempfile::tempdir().unwrap();
    let disk = DiskOptions { direct: Requirement::Off, ..SlabOptions::default().disk };
    let options = SlabOptions { disk, ..SlabOptions::default() };
    let slabs = open_one(folder.path(), group(3 * PAGE as u64, 64), &options);
    round_trip(&slabs, &[1, 511, PAGE, PAGE + 1, 2 * PAGE + 5, 3 * PAGE], 1);
}

#[test]
fn the_rest_of_the_last_page_is_zeroed_and_other_slots_stay() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = open_one(folder.path(), group(2 * PAGE as u64, 3), &SlabOptions::default());
    for slot in 0..3 {
        write(&slabs, slot, &[0xFF; 2 * PAGE]);
    }
    write(&slabs, 1, &[0x11; PAGE + 10]);
    drop(slabs);
    let file = std::fs::read(folder.path().join("slab.0.000")).unwrap();
    let (before, rest) = file.split_at(2 * PAGE);
    let (slot, after) = rest.split_at(2 * PAGE);
    assert!(before.iter().chain(after).all(|&byte| byte == 0xFF));
    assert!(slot[..PAGE + 10].iter().all(|&byte| byte == 0x11));
    assert!(slot[PAGE + 10..].iter().all(|&byte| byte == 0));
}

/// Memory whose end is the end of what the process may access.
struct BeforeTheEnd(*mut u8);

impl BeforeTheEnd {
    const BYTES: usize = 4 * PAGE;

    fn new() -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let (access, bytes) = (libc::PROT_READ | libc::PROT_WRITE, Self::BYTES + PAGE);
        // SAFETY: the kernel chooses a range where nothing is mapped.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        let end = base.cast::<u8>().wrapping_add(Self::BYTES);
        // SAFETY: the last page belongs to the mapping.
        assert_eq!(unsafe { libc::mprotect(end.cast(), PAGE, libc::PROT_NONE) }, 0);
        Self(base.cast())
    }

    /// The last `length` bytes.
    fn buffers(&self, length: usize) -> SlabBuffers {
        let address = NonNull::new(self.0.wrapping_add(Self::BYTES - length)).unwrap();
        let address = HostAddress::new(address);
        [IoBuffer { address, length: ByteCount::from_usize(length) }].into_iter().collect()
    }
}

impl Drop for BeforeTheEnd {
    fn drop(&mut self) {
        // SAFETY: the mapping is no longer used.
        unsafe { libc::munmap(self.0.cast(), Self::BYTES + PAGE) };
    }
}

#[test]
fn no_byte_after_the_block_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let slabs = open_one(folder.path(), group(4 * PAGE as u64, 4), &SlabOptions::default());
    let memory = BeforeTheEnd::new();
    for length in [1, 511, 512, 513, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 512, 4 * PAGE] {
        let done = run(&slabs, request(2, memory.buffers(length), SlabDirection::Write)).unwrap();
        assert_eq!(done.checksum, crc64(&vec![0; length]));
        let direction = SlabDirection::Read { checksum: done.checksum };
        run(&slabs, request(2, memory.buffers(length), direction)).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// A block of any spans is read into any other spans.
    #[test]
    fn spans_of_any_length_and_alignment_come_back(
        lengths in vec(0_usize..30_000, 1..20),
        skews in vec(0_usize..PAGE, 20),
        cuts in vec(0_usize..30_000, 1..20),
        request_pages in 1_u32..9,
    ) {
        let total: usize = lengths.iter().sum::<usize>().max(1);
        let aligned = |skew: usize| if skew.is_multiple_of(3) { 0 } else { skew };
        let mut from: Vec<(usize, usize)> =
            lengths.iter().zip(&skews).map(|(&length, &skew)| (aligned(skew), length)).collect();
        if lengths.iter().all(|&length| length == 0) {
            from.push((0, 1));
        }
        let mut to = Vec::new();
        let mut left = total;
        for (&cut, &skew) in cuts.iter().zip(skews.iter().rev()) {
            to.push((aligned(skew), cut.min(left)));
            left -= cut.min(left);
        }
        to.push((0, left));
        let folder = tempfile::tempdir().unwrap();
        let request_bytes = ByteCount::kib(4 * request_pages);
        let options = SlabOptions { request: request_bytes, depth: 4, ..SlabOptions::default() };
        let slabs = open_one(folder.path(), group(total as u64, 2), &options);
        let (mut source, mut target) = (Guarded::new(&from), Guarded::new(&to));
        let content = pattern(total as u64, total);
        source.fill(&content);
        let done = run(&slabs, request(1, source.buffers(), SlabDirection::Write)).unwrap();
        prop_assert_eq!(done.checksum, crc64(&content));
        let direction = SlabDirection::Read { checksum: done.checksum };
        run(&slabs, request(1, target.buffers(), direction)).unwrap();
        prop_assert_eq!(target.content(), content);
        source.check_guards();
        target.check_guards();
    }
}
