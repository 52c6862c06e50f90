//! Checksums of the blocks of transfers are independent of layouts.

use std::sync::Arc;
use std::time::Instant;

use terrane_core::checksum::crc64;
use terrane_core::{Allocate, ByteCount, Region, RegionRequest, StorageKind};
use terrane_layout::{Geometry, LayoutBuilder, LayoutConfig};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::conformance::formats::{
    SIZES, Tried, each_pair, endpoint, geometries, is_of_files, shapes, transfer,
};
use terrane_testkit::engine::SimulatedEngine;
use terrane_testkit::memory::HeapAllocator;
use terrane_testkit::pattern::{InProcess, PieceAccess};
use terrane_testkit::random::Seeded;
use terrane_testkit::regions::{Copied, RegionBytes};
use terrane_transfer::engines::{
    DiskEngine, DiskEngineOptions, HostEngine, HostEngineOptions, RelayEngine, RelayOptions,
};
use terrane_transfer::{
    Checksums, CopyEngine, CopyJob, Declined, Endpoint, OnlyPath, Quote, Transfer, TransferError,
    TransferManager, TransferOptions, TransferPlan,
};

use crate::relays::{slots, to_device};
use crate::support::{CONTIGUOUS, OUTER_FIRST, Rig, config, refused};

fn host() -> Arc<dyn CopyEngine> {
    // Small chunks, so that threads share each transfer.
    let options = HostEngineOptions { chunk: ByteCount::new(64), ..HostEngineOptions::default() };
    Arc::new(HostEngine::new(options).unwrap())
}

fn disk() -> Arc<dyn CopyEngine> {
    Arc::new(DiskEngine::new(&DiskEngineOptions::default()).unwrap())
}

/// The checksum of a block's bytes, read one by one.
fn checksum(end: &Endpoint, block: u32, tokens: std::ops::Range<u32>) -> u64 {
    let geometry = end.layout().geometry();
    let mut bytes = Vec::new();
    geometry.canonical_spans_of(block, 0..geometry.num_layers(), tokens, &mut |at, length| {
        let mut span = vec![0; ByteCount::new(length).to_usize()];
        let location = end.layout().location_at(at).unwrap();
        // SAFETY: the region is alive, and no transfer of it is in flight.
        unsafe { InProcess.read(location, &mut span) }.unwrap();
        bytes.extend(span);
    });
    crc64(&bytes)
}

/// Copies every pair of formats of equal shape, and compares the checksums with those of the
/// source.
/// Returns the number of transfers.
fn check_all(
    manager: &TransferManager,
    sources: &Tried<impl Fn(&Geometry) -> Endpoint>,
    destinations: &Tried<impl Fn(&Geometry) -> Endpoint>,
) -> usize {
    each_pair(&InProcess, Seeded::new(7), sources, destinations, |[from, to], copied, what| {
        check(manager, from, to, copied, what);
    })
}

fn check(
    manager: &TransferManager,
    source: &Endpoint,
    destination: &Endpoint,
    copied: &Copied,
    what: &str,
) {
    let [tokens, there] = copied.tokens.clone().unwrap_or([0..u32::MAX, 0..u32::MAX]);
    let expected: Vec<u64> =
        copied.from.iter().map(|&block| checksum(source, block, tokens.clone())).collect();
    let transfer = || ordered(transfer(source, destination, copied), source, destination);
    let submit = |checksums| match manager.submit(transfer().checksums(checksums), ()) {
        Ok(completion) => end_of(completion).result,
        Err(rejected) => panic!("{what}: {rejected}"),
    };
    let report = submit(Checksums::Compute).unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(report.checksums.as_deref(), Some(&expected[..]), "{what}");
    for (&block, &sum) in copied.to.iter().zip(&expected) {
        assert_eq!(checksum(destination, block, there.clone()), sum, "{what}");
    }
    let mut wrong = expected.clone();
    wrong[copied.to.len() - 1] ^= 1 << 40;
    let error = submit(Checksums::Verify(wrong.into())).unwrap_err();
    let TransferError::ChecksumMismatch { blocks } = &error else { panic!("{what}: {error}") };
    let named: Vec<_> = blocks.iter().map(|it| (it.source_block, it.destination_block)).collect();
    assert_eq!(named, [(*copied.from.last().unwrap(), *copied.to.last().unwrap())], "{what}");
    assert_eq!((blocks[0].found, blocks[0].expected ^ 1 << 40), (blocks[0].found, blocks[0].found));
    assert!(!error.is_refusal());
    submit(Checksums::Verify(expected.into())).unwrap_or_else(|error| panic!("{what}: {error}"));
}

fn in_memory(is_tried: fn(&str) -> bool) -> Tried<impl Fn(&Geometry) -> Endpoint> {
    let endpoint = |geometry: &Geometry| endpoint(geometry, &HeapAllocator::system());
    Tried { endpoint, is_tried }
}

#[test]
fn checksums_do_not_depend_on_the_layouts_in_host_memory() {
    let transfers =
        check_all(&TransferManager::new([host()]), &in_memory(is_of_files), &in_memory(|_| true));
    assert!(transfers > 300, "{transfers}");
}

#[test]
fn checksums_do_not_depend_on_the_layouts_in_files() {
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    // Requests of less than two blocks, so that most blocks are in two of them.
    let options = DiskEngineOptions { request: ByteCount::kib(4), ..DiskEngineOptions::default() };
    let manager = TransferManager::new([Arc::new(DiskEngine::new(&options).unwrap()) as _]);
    let endpoint = |geometry: &Geometry| endpoint(geometry, &files);
    let in_file = Tried { endpoint, is_tried: is_of_files };
    let written = check_all(&manager, &in_memory(is_of_files), &in_file);
    let read = check_all(&manager, &in_file, &in_memory(is_of_files));
    // Between files, from blocks in canonical order.
    let geometries = geometries();
    let [(_, from)] = geometries
        .iter()
        .filter(|(name, _)| *name == "dynamo.fully_contiguous")
        .collect::<Vec<_>>()[..]
    else {
        panic!("one format is in canonical order")
    };
    let source = (in_file.endpoint)(from);
    RegionBytes::scribble(&source, &InProcess, 12);
    let (layers, mut between) = (0..from.num_layers(), 0);
    for (name, to) in geometries.iter().filter(|(name, _)| is_of_files(name)) {
        if shapes(from) == shapes(to) {
            let (ids, layers) = ((vec![4, 0, 2, 3], vec![1, 5, 3, 0]), layers.clone());
            let copied = Copied { from: ids.0, to: ids.1, layers, heads: None, tokens: None };
            check(&manager, &source, &(in_file.endpoint)(to), &copied, name);
            between += 1;
        }
    }
    assert!(between > 2, "{between} between files");
    assert!(written > 100 && read > 100, "{written} written, {read} read");
}

/// Whole blocks are copied through the engine's buffers, because the memory is not aligned for
/// direct I/O. A buffer has room for half a block, or for many.
#[test]
fn checksums_of_bytes_in_buffers_are_those_of_the_blocks() {
    let name = "checksums_of_bytes_in_buffers_are_those_of_the_blocks";
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    // Blocks of 8 KiB.
    let config =
        crate::support::shape().num_blocks(12).page_size(16).inner_dim(32).build().unwrap();
    let block = config_bytes(&config);
    assert_eq!(block, ByteCount::kib(8));
    let stored = crate::support::endpoint_in(&files, config, CONTIGUOUS);
    let bytes = block.checked_mul("blocks", 12).unwrap();
    let loose = || {
        let heap = HeapAllocator::system();
        let more = bytes.checked_add(ByteCount::new(64)).unwrap();
        let region = Region::new(heap.allocate(&RegionRequest::new(more)).unwrap());
        let region = region.view(ByteCount::new(4), bytes).unwrap();
        let layout = LayoutBuilder::new(config).kind(CONTIGUOUS).adopt(vec![region]);
        Endpoint::new(layout.unregistered().build().unwrap()).unwrap()
    };
    let [from, to] = [(); 2].map(|()| loose());
    RegionBytes::scribble(&from, &InProcess, 11);
    for request in [4, 1024] {
        let request = ByteCount::kib(request);
        let options = DiskEngineOptions { request, ..DiskEngineOptions::default() };
        let manager = TransferManager::new([Arc::new(DiskEngine::new(&options).unwrap()) as _]);
        let path = manager.explain(&Transfer::new(&from, &stored).blocks(&[0], &[0])).unwrap();
        if path.path() != "direct staged" {
            return eprintln!("skipped: {name}: a disk with direct I/O needed, this is {path}");
        }
        let copied = |from: &[u32], to: &[u32]| Copied {
            from: from.to_vec(),
            to: to.to_vec(),
            layers: 0..4,
            heads: None,
            tokens: None,
        };
        // Adjacent blocks in the file, in another order than in memory; then a block that is read
        // twice.
        let blocks = [3, 4, 5, 0, 9, 11, 1];
        check(&manager, &from, &stored, &copied(&blocks, &[7, 6, 0, 1, 2, 8, 10]), "to the file");
        check(&manager, &stored, &to, &copied(&[7, 6, 0, 1, 2, 8, 10], &blocks), "from the file");
        check(&manager, &stored, &to, &copied(&[1, 2, 1, 2], &[4, 5, 8, 9]), "read twice");
    }
}

fn config_bytes(config: &LayoutConfig) -> ByteCount {
    Geometry::new(config, CONTIGUOUS).unwrap().block_bytes()
}

/// Slots of one block, and of one layer of a block.
#[test]
fn checksums_of_relays_are_combined_from_those_of_their_chunks() {
    for (slot_bytes, least) in [(4096, 100), (1024, 20)] {
        let options = RelayOptions { slot_bytes: ByteCount::new(slot_bytes), ..slots(3, 0) };
        let relay = RelayEngine::new(host(), host(), HeapAllocator::pinned(), &options).unwrap();
        let manager = TransferManager::new([Arc::new(relay) as _]);
        let is_tried: fn(&str) -> bool = match slot_bytes {
            4096 => is_of_files,
            // All sections of these formats have layers.
            _ => |name| name.starts_with("vllm.b") || name.starts_with("sglang.page"),
        };
        let transfers = check_all(&manager, &in_memory(is_tried), &in_memory(is_tried));
        assert!(transfers > least, "{transfers}");
    }
}

/// The engine of a simulated device computes no checksums. The relay's other engine does, in either
/// direction.
#[test]
fn a_relay_uses_the_checksums_of_the_hop_that_computes_them() {
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let device = Arc::new(SimulatedEngine::new(to_device()));
    let options = RelayOptions::default();
    let relay =
        RelayEngine::new(device.clone(), disk(), HeapAllocator::pinned(), &options).unwrap();
    let manager = TransferManager::new([device as _, Arc::new(relay) as _]);
    let geometry = &geometries()[0].1;
    let on_device = endpoint(geometry, &HeapAllocator::simulated_device(0));
    let in_file = endpoint(geometry, &files);
    RegionBytes::scribble(&on_device, &InProcess, 3);
    RegionBytes::scribble(&in_file, &InProcess, 4);
    let all = 0..SIZES.layers;
    let copied =
        Copied { from: vec![4, 0], to: vec![5, 2], layers: all, heads: None, tokens: None };
    check(&manager, &on_device, &in_file, &copied, "to the file");
    check(&manager, &in_file, &on_device, &copied, "to the device");
    // Between the device and pinned memory there is only the device's engine.
    let pinned = endpoint(geometry, &HeapAllocator::pinned());
    let transfer = ordered(transfer(&on_device, &pinned, &copied), &on_device, &pinned);
    let error = refused(&manager, transfer.checksums(Checksums::Compute));
    let TransferError::NoEngine { declined, .. } = &error else { panic!("{error}") };
    assert_eq!(declined[0].1, Declined::Checksums);
}

/// Every byte of a stored block counts. The error does not name the transfer's other blocks.
#[test]
fn a_damaged_byte_of_a_file_is_found_and_its_block_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let manager = TransferManager::new([disk()]);
    let [from, to] = [CONTIGUOUS, OUTER_FIRST]
        .map(|kind| crate::support::endpoint_in(&HeapAllocator::system(), config(8), kind));
    let stored = crate::support::endpoint_in(&files, config(8), CONTIGUOUS);
    RegionBytes::scribble(&from, &InProcess, 9);
    let ids = [0, 1, 2, 3, 4, 5, 6, 7];
    let write = Transfer::new(&from, &stored).blocks(&ids, &ids).checksums(Checksums::Compute);
    let sums = end_of(manager.submit(write, ()).unwrap()).result.unwrap().checksums.unwrap();
    let block_bytes = stored.layout().geometry().block_bytes().get();
    let mut random = Seeded::new(5);
    for _ in 0..200 {
        let (block, byte) = (random.next_u64() % 8, random.next_u64() % block_bytes);
        let at = terrane_layout::RegionOffset { region: 0, offset: block * block_bytes + byte };
        let location = stored.layout().location_at(at).unwrap();
        let mut right = [0];
        // SAFETY: the file is alive, and no transfer of it is in flight; here and below.
        unsafe { InProcess.read(location, &mut right) }.unwrap();
        let damaged = [right[0] ^ (1 << (random.next_u64() % 8))];
        // SAFETY: as above.
        unsafe { InProcess.write(location, &damaged) }.unwrap();
        let read = || Transfer::new(&stored, &to).blocks(&ids, &ids);
        let verify = read().checksums(Checksums::Verify(sums.clone().into()));
        let error = end_of(manager.submit(verify.clone(), ()).unwrap()).result.unwrap_err();
        let TransferError::ChecksumMismatch { blocks } = &error else { panic!("{error}") };
        let named: Vec<_> = blocks.iter().map(|it| u64::from(it.destination_block)).collect();
        assert_eq!(named, [block]);
        to.hold_for_read(&[0]).unwrap_err();
        // SAFETY: as above.
        unsafe { InProcess.write(location, &right) }.unwrap();
        end_of(manager.submit(verify, ()).unwrap()).result.unwrap();
        drop(to.hold_for_read(&ids).unwrap());
    }
}

#[test]
fn checksums_of_parts_and_of_other_numbers_of_blocks_are_refused() {
    let manager = TransferManager::new([host()]);
    let ends = || [CONTIGUOUS, OUTER_FIRST].map(|kind| crate::support::endpoint(config(4), kind));
    let [from, to] = ends();
    let transfer = || Transfer::new(&from, &to).blocks(&[0, 1], &[1, 0]);
    let compute = |transfer: Transfer| refused(&manager, transfer.checksums(Checksums::Compute));
    let error = compute(transfer().layers(0..2));
    assert!(matches!(error, TransferError::ChecksumOfPart { part: "layers" }), "{error}");
    let all_layers = transfer().layers(0..4).checksums(Checksums::Compute);
    end_of(manager.submit(all_layers, ()).unwrap()).result.unwrap();
    let error = refused(&manager, transfer().checksums(Checksums::Verify([1].into())));
    assert!(
        matches!(error, TransferError::UnequalChecksumCounts { sums: 1, blocks: 2 }),
        "{error}"
    );
    let heads = crate::support::shape().num_heads(5).build().unwrap();
    let [from, to] = [CONTIGUOUS, OUTER_FIRST].map(|kind| crate::support::endpoint(heads, kind));
    let transfer = || Transfer::new(&from, &to).blocks(&[0], &[1]);
    let error = compute(transfer().heads(0..2, 1..3));
    assert!(matches!(error, TransferError::ChecksumOfPart { part: "heads" }), "{error}");
    let all_heads = transfer().heads(0..5, 0..5).checksums(Checksums::Compute);
    end_of(manager.submit(all_heads, ()).unwrap()).result.unwrap();
}

#[test]
fn engines_without_checksums_decline_and_explain() {
    let rig = Rig::new(2);
    let transfer = || rig.transfer(&[0], &[0]).checksums(Checksums::Compute);
    let error = rig.refused(transfer());
    assert!(error.to_string().contains("computes no checksums"), "{error}");
    let explained = rig.manager.explain(&transfer()).unwrap_err();
    assert_eq!(explained.to_string(), error.to_string());
    // Copies between files use buffers in the order of the source.
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let [source, destination] =
        [OUTER_FIRST, CONTIGUOUS].map(|kind| crate::support::endpoint_in(&files, config(2), kind));
    let between =
        Transfer::new(&source, &destination).blocks(&[0], &[0]).checksums(Checksums::Compute);
    let error = refused(&TransferManager::new([disk()]), between);
    assert!(error.to_string().contains("computes no checksums"), "{error}");
    // An engine that computes checksums states why it declines these.
    let without = TransferManager::new([Arc::new(WithoutKernels) as _]);
    let error = without.explain(&transfer()).unwrap_err();
    assert!(error.to_string().contains("computes checksums with kernels, and has none"), "{error}");
    without.explain(&rig.transfer(&[0], &[0])).unwrap();
    let nothing = Transfer::new(&rig.source, &rig.destination).checksums(Checksums::Compute);
    let report =
        end_of(TransferManager::new([host()]).submit(nothing, ()).unwrap()).result.unwrap();
    assert_eq!(report.checksums.as_deref(), Some(&[][..]));
}

/// An engine whose quotes decline checksums, for its own reason.
#[derive(Debug)]
struct WithoutKernels;

// SAFETY: it accesses no bytes.
unsafe impl CopyEngine for WithoutKernels {
    fn name(&self) -> &'static str {
        "without kernels"
    }

    fn quote(&self, _: &TransferPlan, options: &TransferOptions) -> Result<Quote, Declined> {
        const PATH: OnlyPath = OnlyPath { path: "nothing", reason: "a test" };
        match options.checksums {
            Some(_) => Err(Declined::ChecksumKernels),
            None => Ok(Quote::constant(std::time::Duration::ZERO, &PATH)),
        }
    }

    fn computes_checksums(&self) -> bool {
        true
    }

    fn submit(&self, job: CopyJob) {
        job.start();
        job.finish(Ok(()));
    }
}

/// An engine that promises checksums and computes none.
#[derive(Debug)]
struct WithoutSums;

// SAFETY: it accesses no bytes.
unsafe impl CopyEngine for WithoutSums {
    fn name(&self) -> &'static str {
        "forgetful"
    }

    fn quote(&self, _: &TransferPlan, _: &TransferOptions) -> Result<Quote, Declined> {
        const PATH: OnlyPath = OnlyPath { path: "nothing", reason: "a test" };
        Ok(Quote::constant(std::time::Duration::ZERO, &PATH))
    }

    fn computes_checksums(&self) -> bool {
        true
    }

    fn submit(&self, job: CopyJob) {
        job.start();
        job.finish(Ok(()));
    }
}

#[test]
fn missing_checksums_are_an_error_of_the_engine() {
    let rig = Rig::new(2);
    let manager = TransferManager::new([Arc::new(WithoutSums) as _]);
    let transfer = rig.transfer(&[0, 1], &[0, 1]).checksums(Checksums::Compute);
    let error = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap_err();
    assert!(matches!(error, TransferError::Engine { engine: "forgetful", .. }), "{error}");
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("computed 0 of 2 checksums"), "{cause}");
}

/// Deadlines and cancellations apply to transfers with checksums, too.
#[test]
fn transfers_with_checksums_stop_at_their_deadline() {
    let manager = TransferManager::new([host()]);
    let [from, to] =
        [CONTIGUOUS, OUTER_FIRST].map(|kind| crate::support::endpoint(config(4), kind));
    assert_eq!(from.kind(), StorageKind::System);
    let transfer = Transfer::new(&from, &to).blocks(&[0, 1], &[1, 0]).deadline(Instant::now());
    let transfer = transfer.checksums(Checksums::Compute);
    let error = end_of(manager.submit(transfer, ()).unwrap()).result.unwrap_err();
    assert!(matches!(error, TransferError::DeadlineExceeded { .. }), "{error}");
}
