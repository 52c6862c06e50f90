//! Checksums that the device computes equal those of the host, in every format and by every path.

use std::ops::Range;
use std::sync::Arc;
use std::thread;

use terrane_core::checksum::crc64;
use terrane_core::{ByteCount, Requirement};
use terrane_cuda::{
    Context, CopyPath, DeviceEngine, DeviceEngineOptions, PinnedAllocator, PinnedOptions,
};
use terrane_layout::{ElementFormat, Geometry, LayoutConfig, LayoutKind};
use terrane_storage::{DiskAllocator, DiskOptions};
use terrane_testkit::conformance::EngineFixture;
use terrane_testkit::conformance::copy_engine::{end_of, ordered};
use terrane_testkit::conformance::formats::{Tried, each_pair, endpoint, transfer};
use terrane_testkit::pattern::PieceAccess;
use terrane_testkit::random::Seeded;
use terrane_testkit::regions::{Copied, RegionBytes};
use terrane_transfer::engines::{DiskEngine, DiskEngineOptions, RelayEngine, RelayOptions};
use terrane_transfer::{
    Checksums, Declined, Endpoint, Report, Transfer, TransferError, TransferManager,
};

use super::fixture::{APART, DEVICE, Fixture, LAYERS_APART, PEER, PINNED, config};
use super::sections::{apart, is_of_pages, is_on_device};
use crate::needs::{Needs, OnDevice, device_with_kernels as device, is_simulated, two_devices};

const ROOM: Needs = Needs { device: ByteCount::mib(512), host: ByteCount::mib(512) };

/// Every path. Simulated kernels are slow, so on a simulated device there is one path with chunks
/// in order, and one without.
fn paths(context: &Context) -> impl Iterator<Item = Option<CopyPath>> {
    let all = [Some(CopyPath::Staged), None, Some(CopyPath::Direct), Some(CopyPath::Batched)];
    all.into_iter().take(if is_simulated(context) { 2 } else { 4 })
}

fn fixture(context: &Context, path: Option<CopyPath>) -> Fixture {
    let ends = [DEVICE, APART, PINNED];
    match path {
        Some(path) => Fixture::in_small_parts(context, path, &ends),
        None => Fixture::new(context, DeviceEngineOptions::default(), &ends),
    }
}

/// The checksums of blocks, computed by the host from bytes read one span at a time.
pub fn sums_of(
    end: &Endpoint,
    access: &dyn PieceAccess,
    blocks: &[u32],
    tokens: Range<u32>,
) -> Vec<u64> {
    let regions = RegionBytes::of(end, access);
    let geometry = end.layout().geometry();
    let sum = |&block: &u32| {
        let mut bytes = Vec::new();
        let layers = 0..geometry.num_layers();
        geometry.canonical_spans_of(block, layers, tokens.clone(), &mut |at, length| {
            let [region, start, length] =
                [at.region.into(), at.offset, length].map(|it| ByteCount::new(it).to_usize());
            bytes.extend_from_slice(&regions.regions()[region][start..start + length]);
        });
        crc64(&bytes)
    };
    blocks.iter().map(sum).collect()
}

/// Copies with checksums, verifies right ones, and detects a wrong one.
pub fn check(
    manager: &TransferManager,
    access: &dyn PieceAccess,
    [source, destination]: [&Endpoint; 2],
    copied: &Copied,
    what: &str,
) {
    let expected = check_computed(manager, access, [source, destination], copied, what);
    let submit = |checksums| submit(manager, [source, destination], copied, checksums);
    let mut wrong = expected.clone();
    let last = copied.to.len() - 1;
    wrong[last] ^= 1 << 40;
    let error = submit(Checksums::Verify(wrong.into())).unwrap_err();
    let TransferError::ChecksumMismatch { blocks } = &error else { panic!("{what}: {error}") };
    let named: Vec<_> = blocks.iter().map(|it| (it.source_block, it.destination_block)).collect();
    assert_eq!(named, [(copied.from[last], copied.to[last])], "{what}");
    assert_eq!(blocks[0].found, expected[last], "{what}");
    submit(Checksums::Verify(expected.into())).unwrap_or_else(|error| panic!("{what}: {error}"));
}

fn submit(
    manager: &TransferManager,
    [source, destination]: [&Endpoint; 2],
    copied: &Copied,
    checksums: Checksums,
) -> Result<Report, TransferError> {
    let transfer = transfer(source, destination, copied).checksums(checksums);
    match manager.submit(ordered(transfer, source, destination), ()) {
        Ok(completion) => end_of(completion).result,
        Err(rejected) => panic!("{copied:?}: {rejected}"),
    }
}

/// Copies with checksums, and returns them.
fn check_computed(
    manager: &TransferManager,
    access: &dyn PieceAccess,
    [source, destination]: [&Endpoint; 2],
    copied: &Copied,
    what: &str,
) -> Vec<u64> {
    let [tokens, there] = copied.tokens.clone().unwrap_or([0..u32::MAX, 0..u32::MAX]);
    let expected = sums_of(source, access, &copied.from, tokens);
    let report = submit(manager, [source, destination], copied, Checksums::Compute);
    let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));
    assert_eq!(report.checksums.as_deref(), Some(&expected[..]), "{what}: {}", report.explanation);
    assert_eq!(sums_of(destination, access, &copied.to, there), expected, "{what}");
    expected
}

/// Every pair of formats of equal shape. Returns the number of selections.
fn check_all(
    manager: &TransferManager,
    access: &dyn PieceAccess,
    sources: &Tried<impl Fn(&Geometry) -> Endpoint>,
    destinations: &Tried<impl Fn(&Geometry) -> Endpoint>,
) -> usize {
    each_pair(access, Seeded::new(9), sources, destinations, |ends, copied, what| {
        check_computed(manager, access, ends, copied, what);
    })
}

#[test]
fn checksums_equal_those_of_the_host_in_every_format_by_every_path() {
    let name = "checksums_equal_those_of_the_host_in_every_format_by_every_path";
    let Some(context) = device(name, ROOM) else { return };
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
    let on_host = |geometry: &Geometry| endpoint(geometry, &pinned);
    let on_device = |geometry: &Geometry| apart(&context, geometry);
    for path in paths(&context) {
        let fixture = fixture(&context, path);
        let manager = fixture.manager();
        let here = Tried { endpoint: on_device, is_tried: is_on_device };
        let there = Tried { endpoint: on_host, is_tried: is_of_pages };
        let checked = check_all(&manager, fixture.access(), &here, &there);
        assert!(checked > 200, "{path:?}: {checked}");
        let checked = check_all(&manager, fixture.access(), &there, &here);
        assert!(checked > 200, "{path:?}: {checked}");
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn checksums_equal_those_of_the_host_within_the_device() {
    let name = "checksums_equal_those_of_the_host_within_the_device";
    let Some(context) = device(name, ROOM) else { return };
    let is_tried: fn(&str) -> bool = if is_simulated(&context) { is_on_device } else { |_| true };
    let fixture = fixture(&context, None);
    let [from, to] = [(); 2]
        .map(|()| Tried { endpoint: |geometry: &Geometry| apart(&context, geometry), is_tried });
    let checked = check_all(&fixture.manager(), fixture.access(), &from, &to);
    assert!(checked > 200, "{checked}");
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn checksums_between_devices_are_computed_by_the_device_that_copies() {
    let name = "checksums_between_devices_are_computed_by_the_device_that_copies";
    let Some([context, peer]) = two_devices(name, ROOM) else { return };
    for path in [None, Some(CopyPath::Peer), Some(CopyPath::Batched)] {
        let ends = [APART, PEER];
        let fixture = match path {
            Some(path) => Fixture::in_small_parts(&context, path, &ends),
            None => Fixture::new(&context, DeviceEngineOptions::default(), &ends),
        };
        let fixture = fixture.beside(peer.clone());
        let shape = config(12, 3, 5);
        let here = fixture.endpoint(APART, shape, LAYERS_APART);
        let there = fixture.endpoint(PEER, shape, LayoutKind::FullyContiguous);
        for (seed, ends) in [(1, [&here, &there]), (2, [&there, &here])] {
            RegionBytes::scribble(ends[0], fixture.access(), seed);
            let what = format!("{path:?}, {seed}");
            check(&fixture.manager(), fixture.access(), ends, &blocks(&[3, 0, 11, 7], 3), &what);
        }
    }
    assert_eq!((context.lost(), peer.lost()), (None, None));
}

/// Copies whole blocks to blocks in reverse order.
fn blocks(ids: &[u32], layers: u32) -> Copied {
    let to = ids.iter().rev().copied().collect();
    Copied { from: ids.to_vec(), to, layers: 0..layers, heads: None, tokens: None }
}

fn odd(tokens: u32, elements: u32, width: u8) -> LayoutConfig {
    let config = LayoutConfig::builder().num_blocks(5).num_layers(2).outer_dim(2);
    let config = config.page_size(tokens).inner_dim(elements).element(ElementFormat::Width(width));
    config.build().unwrap()
}

/// Rows of 1 to 60 bytes, in short blocks and in blocks of many segments. Their lengths are
/// multiples of no word.
#[test]
fn pieces_of_odd_lengths_have_their_checksums() {
    let Some(context) = device("pieces_of_odd_lengths_have_their_checksums", ROOM) else { return };
    let sizes = [(1, 1, 1), (3, 5, 1), (7, 31, 1), (3, 7, 2), (5, 3, 4), (9, 5, 8), (33, 129, 1)];
    for path in paths(&context) {
        let fixture = fixture(&context, path);
        let (manager, access) = (fixture.manager(), fixture.access());
        for (tokens, elements, width) in sizes {
            let shape = odd(tokens, elements, width);
            for kind in LayoutKind::ALL {
                let here = fixture.endpoint(APART, shape, LAYERS_APART);
                let there = fixture.endpoint(PINNED, shape, kind);
                for (seed, ends) in [(1, [&here, &there]), (2, [&there, &here])] {
                    RegionBytes::scribble(ends[0], access, seed);
                    let what = format!("{path:?}, {tokens} of {elements} of {width}, {kind:?}");
                    check(&manager, access, ends, &blocks(&[2], 2), &what);
                    let some = blocks(&[4, 0, 2, 1, 3], 2);
                    check_computed(&manager, access, ends, &some, &what);
                }
            }
        }
        // Blocks whose bytes no section describes.
        for bytes in [1, 15, 511, 512, 513, 30_003] {
            let geometry = Geometry::opaque(3, bytes).unwrap();
            let here = apart(&context, &geometry);
            let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
            let there = endpoint(&geometry, &pinned);
            for (seed, ends) in [(3, [&here, &there]), (4, [&there, &here])] {
                RegionBytes::scribble(ends[0], access, seed);
                let what = format!("{path:?}, {bytes} bytes");
                check_computed(&manager, access, ends, &blocks(&[2, 0, 1], 1), &what);
            }
        }
    }
}

/// Many chunks, in the order of the blocks and in others. Their sums are submitted while later
/// chunks are copied. A buffer has room for many blocks, for one, and for less than one.
#[test]
fn chunks_of_large_transfers_are_summed_as_they_arrive() {
    let name = "chunks_of_large_transfers_are_summed_as_they_arrive";
    let Some(context) = device(name, ROOM) else { return };
    let (shape, mut random) = (config(48, 3, 2), Seeded::new(7));
    let parts = [ByteCount::kib(2), ByteCount::kib(20), ByteCount::mib(1)];
    for path in [CopyPath::Staged, CopyPath::Direct, CopyPath::Batched, CopyPath::CopyEach] {
        for scratch in parts.into_iter().skip(usize::from(path != CopyPath::Staged)) {
            let options = DeviceEngineOptions {
                path: Some(path),
                scratch_bytes: scratch,
                request_bytes: scratch,
                ..DeviceEngineOptions::default()
            };
            let fixture = Fixture::new(&context, options, &[APART, DEVICE, PINNED]);
            let (manager, access) = (fixture.manager(), fixture.access());
            for (end, device_kind) in [(APART, LAYERS_APART), (DEVICE, LayoutKind::FullyContiguous)]
            {
                for host_kind in LayoutKind::ALL {
                    let here = fixture.endpoint(end, shape, device_kind);
                    let there = fixture.endpoint(PINNED, shape, host_kind);
                    let mut ids: Vec<u32> = (0..48).collect();
                    random.shuffle(&mut ids);
                    for (seed, ends) in [(1, [&here, &there]), (2, [&there, &here])] {
                        RegionBytes::scribble(ends[0], access, seed);
                        let what = format!("{path} {scratch} {end} {host_kind:?} {seed}");
                        check_computed(&manager, access, ends, &blocks(&ids[..36], 3), &what);
                        let sorted: Vec<u32> = (5..41).collect();
                        let copied = Copied { to: sorted.clone(), ..blocks(&sorted, 3) };
                        check_computed(&manager, access, ends, &copied, &what);
                    }
                }
            }
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn a_transfer_of_no_blocks_has_no_checksums() {
    let Some(context) = device("a_transfer_of_no_blocks_has_no_checksums", ROOM) else { return };
    let fixture = fixture(&context, None);
    let shape = config(2, 2, 4);
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    for (from, to) in [(&here, &there), (&there, &here)] {
        for checksums in [Checksums::Compute, Checksums::Verify([].into())] {
            let transfer = ordered(Transfer::new(from, to), from, to).checksums(checksums);
            let report = end_of(fixture.manager().submit(transfer, ()).unwrap()).result.unwrap();
            assert_eq!(report.checksums.as_deref(), Some(&[][..]));
        }
    }
}

/// One bit of one byte, on the device and in pinned memory.
#[test]
fn a_damaged_byte_is_found_and_its_block_is_named() {
    let name = "a_damaged_byte_is_found_and_its_block_is_named";
    let Some(context) = device(name, ROOM) else { return };
    let fixture = fixture(&context, None);
    let (manager, access) = (fixture.manager(), fixture.access());
    let shape = config(8, 3, 4);
    let here = fixture.endpoint(APART, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let (ids, mut random): (Vec<u32>, _) = ((0..8).collect(), Seeded::new(5));
    for (from, to) in [(&here, &there), (&there, &here)] {
        RegionBytes::scribble(from, access, 9);
        let transfer = |checksums| {
            let transfer = Transfer::new(from, to).blocks(&ids, &ids).checksums(checksums);
            end_of(manager.submit(ordered(transfer, from, to), ()).unwrap()).result
        };
        let sums = transfer(Checksums::Compute).unwrap().checksums.unwrap();
        let verify = || transfer(Checksums::Verify(sums.clone().into()));
        for _ in 0..20 {
            let mut below = |most: u64| u32::try_from(random.next_u64() % most).unwrap_or(u32::MAX);
            let (block, layer, section) = (below(8), below(3), below(2));
            let mut at = from.layout().geometry().offset(block, layer, section);
            at.offset += u64::from(below(4 * 128 * 2));
            let location = from.layout().location_at(at).unwrap();
            let mut right = [0];
            // SAFETY: the memory is alive, and no transfer of it is in flight; here and below.
            unsafe { access.read(location, &mut right) }.unwrap();
            // SAFETY: as above.
            unsafe { access.write(location, &[right[0] ^ (1 << below(8))]) }.unwrap();
            let error = verify().unwrap_err();
            let TransferError::ChecksumMismatch { blocks } = &error else { panic!("{error}") };
            let named: Vec<_> = blocks.iter().map(|it| it.destination_block).collect();
            assert_eq!(named, [block]);
            to.hold_for_read(&[0]).unwrap_err();
            // SAFETY: as above.
            unsafe { access.write(location, &right) }.unwrap();
            verify().unwrap();
        }
    }
}

/// More concurrent transfers than there are tables, and than there are streams.
#[test]
fn transfers_of_many_threads_have_their_own_checksums() {
    let name = "transfers_of_many_threads_have_their_own_checksums";
    let Some(context) = device(name, ROOM) else { return };
    let fixture = fixture(&context, None);
    let (manager, shape) = (fixture.manager(), config(64, 4, 8));
    let here = fixture.endpoint(APART, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    RegionBytes::scribble(&here, fixture.access(), 3);
    let all: Vec<u32> = (0..64).collect();
    let expected = sums_of(&here, fixture.access(), &all, 0..u32::MAX);
    thread::scope(|scope| {
        for number in 0..8_u32 {
            let (manager, here, there, expected) = (&manager, &here, &there, &expected);
            scope.spawn(move || {
                let ids: Vec<u32> = (number * 8..(number + 1) * 8).collect();
                let mine = ByteCount::new(u64::from(number) * 8).to_usize();
                for _ in 0..4 {
                    for (from, to) in [(here, there), (there, here)] {
                        let each: Vec<_> = ids
                            .iter()
                            .map(|id| {
                                let transfer = Transfer::new(from, to).blocks(&[*id], &[*id]);
                                let transfer = transfer.checksums(Checksums::Compute);
                                manager.submit(ordered(transfer, from, to), ()).unwrap()
                            })
                            .collect();
                        for (completion, expected) in each.into_iter().zip(&expected[mine..]) {
                            let report = end_of(completion).result.unwrap();
                            assert_eq!(report.checksums.as_deref(), Some(&[*expected][..]));
                        }
                    }
                }
            });
        }
    });
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

#[test]
fn without_kernels_checksums_are_declined_and_the_reason_is_stated() {
    let name = "without_kernels_checksums_are_declined_and_the_reason_is_stated";
    let Some(context) = device(name, ROOM) else { return };
    let options = DeviceEngineOptions { kernels: Requirement::Off, ..Default::default() };
    let without = Fixture::new(&context, options, &[DEVICE, PINNED]);
    let shape = config(2, 2, 4);
    let here = without.endpoint(DEVICE, shape, LAYERS_APART);
    let there = without.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let transfer = ordered(Transfer::new(&here, &there), &here, &there).blocks(&[0], &[1]);
    let wanted = transfer.clone().checksums(Checksums::Compute);
    let error = without.manager().explain(&wanted).unwrap_err();
    let TransferError::NoEngine { declined, .. } = &error else { panic!("{error}") };
    assert_eq!(declined[0], ("cuda", Declined::ChecksumKernels));
    assert!(error.to_string().contains("computes checksums with kernels"), "{error}");
    without.manager().explain(&transfer).unwrap();
    // With kernels, the explanation names the kernel that computes them.
    let explanation = fixture(&context, None).manager().explain(&wanted).unwrap().to_string();
    assert!(explanation.contains("a kernel computes the checksums"), "{explanation}");
}

/// Through slots of whole blocks, and of one layer: the device sums the chunks, and the relay
/// combines their sums.
#[test]
fn checksums_of_relayed_transfers_are_joined_from_those_of_the_device() {
    let name = "checksums_of_relayed_transfers_are_joined_from_those_of_the_device";
    let Some(context) = device(name, ROOM) else { return };
    let directory = tempfile::tempdir().unwrap();
    let files = DiskAllocator::new(directory.path(), DiskOptions::default()).unwrap();
    let access = OnDevice::new(&context);
    let shape = config(8, 4, 4);
    let here = super::fixture::apart(&context, shape, LAYERS_APART);
    for (kind, slot_bytes) in [
        (LayoutKind::FullyContiguous, ByteCount::mib(1)),
        (LAYERS_APART, ByteCount::mib(1)),
        (LAYERS_APART, ByteCount::kib(3)),
    ] {
        let there = super::fixture::endpoint(&files, shape, kind);
        let engine = DeviceEngine::new(&context, DeviceEngineOptions::default()).unwrap();
        let disk = DiskEngine::new(&DiskEngineOptions::default()).unwrap();
        let pinned = PinnedAllocator::new(&context, PinnedOptions::default()).unwrap();
        let options = RelayOptions { slots: 2, slot_bytes };
        let relay = RelayEngine::new(Arc::new(engine), Arc::new(disk), pinned, &options).unwrap();
        let manager = TransferManager::new([Arc::new(relay) as _]);
        for (seed, ends) in [(1, [&here, &there]), (2, [&there, &here])] {
            RegionBytes::scribble(ends[0], &access, seed);
            let what = format!("{kind:?}, {slot_bytes}, {seed}");
            check(&manager, &access, ends, &blocks(&[6, 1, 0, 7, 3], 4), &what);
        }
    }
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}

/// The memory of the tables is returned, and reused.
#[test]
fn checksums_keep_no_memory() {
    let Some(context) = device("checksums_keep_no_memory", ROOM) else { return };
    let fixture = fixture(&context, None);
    let (manager, shape) = (fixture.manager(), config(16, 2, 4));
    let here = fixture.endpoint(DEVICE, shape, LAYERS_APART);
    let there = fixture.endpoint(PINNED, shape, LayoutKind::FullyContiguous);
    let run = || {
        for (from, to) in [(&here, &there), (&there, &here)] {
            let transfer = Transfer::new(from, to).blocks(&[1, 2], &[3, 4]);
            let transfer = ordered(transfer, from, to).checksums(Checksums::Compute);
            end_of(manager.submit(transfer, ()).unwrap()).result.unwrap();
        }
    };
    run();
    let held = |context: &Context| {
        let device = context.usage().device;
        (device.count, device.bytes)
    };
    let before = held(&context);
    (0..50).for_each(|_| run());
    assert_eq!(held(&context), before);
    assert_eq!((context.lost(), context.failed_drops()), (None, 0));
}
