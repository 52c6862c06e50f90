//! Copies by kernels, compared byte for byte with the model of strided copies. Every end is exactly
//! as long as its cells need, so that a memory checker detects an access beyond it.

use std::thread;

use terrane_core::{
    Alignment, Allocate, ByteCount, DeviceAddress, Location, Memory, RegionRequest, StorageKind,
};
use terrane_cuda::{
    BlockIds, Context, CudaError, DeviceAllocator, DeviceMemory, GridLaunch, INLINE_BLOCKS,
    Kernels, LaunchEnd, PinnedAllocator, PinnedMemory, PinnedOptions,
};
use terrane_testkit::pattern::PieceAccess;
use terrane_testkit::random::Seeded;
use terrane_testkit::strided::{StridedCase, StridedEnd, StridedIds};

use crate::needs::{LITTLE, Needs, OnDevice, device_with_kernels as device};

/// Memory at one end of a copy.
enum Place {
    Device(DeviceMemory),
    Pinned(Box<PinnedMemory>),
}

impl Place {
    fn new(bench: &Bench, kind: StorageKind, length: usize) -> Self {
        let request = RegionRequest::new(ByteCount::from_usize(length));
        match kind {
            StorageKind::Pinned => Self::Pinned(Box::new(bench.pinned.allocate(&request).unwrap())),
            _ => Self::Device(bench.device.allocate(&request).unwrap()),
        }
    }

    /// The address for kernels.
    fn address(&self) -> u64 {
        match self {
            Self::Device(memory) => memory.address().get(),
            Self::Pinned(memory) => memory.device_alias().unwrap().get(),
        }
    }

    fn location(&self) -> Location {
        match self {
            Self::Device(memory) => memory.location(),
            Self::Pinned(memory) => memory.location(),
        }
    }
}

/// The fixture of these tests.
struct Bench {
    kernels: Kernels,
    access: OnDevice,
    device: DeviceAllocator,
    pinned: PinnedAllocator,
}

impl Bench {
    fn new(context: &Context) -> Self {
        Self {
            kernels: Kernels::load(context).unwrap(),
            access: OnDevice::new(context),
            device: DeviceAllocator::new(context),
            pinned: PinnedAllocator::new(context, PinnedOptions::default()).unwrap(),
        }
    }

    fn both_kinds(&self) -> [StorageKind; 2] {
        [self.access.0.context().kind(), StorageKind::Pinned]
    }

    fn filled(&self, kind: StorageKind, bytes: &[u8]) -> Place {
        let place = Place::new(self, kind, bytes.len());
        // SAFETY: the memory was allocated here with this length.
        unsafe { self.access.write(place.location(), bytes) }.unwrap();
        place
    }

    fn read(&self, place: &Place, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        // SAFETY: the memory has this length, and every launch on the stream comes before.
        unsafe { self.access.read(place.location(), &mut bytes) }.unwrap();
        bytes
    }

    /// Numbers in device memory.
    fn on_device<const N: usize>(&self, numbers: impl Iterator<Item = [u8; N]>) -> Place {
        let bytes: Vec<u8> = numbers.flatten().collect();
        self.filled(self.access.0.context().kind(), &bytes)
    }

    /// An end as a kernel argument. Its lists and tables are added to `keep`.
    fn end(
        &self,
        case: &StridedEnd,
        at: u64,
        inline: &mut Vec<u32>,
        keep: &mut Vec<Place>,
    ) -> LaunchEnd {
        let [block_stride, layer_stride, outer_stride, row_stride, column_stride] = case.strides;
        let mut end = LaunchEnd {
            base: at + case.base,
            block_stride,
            layer_stride,
            outer_stride,
            row_stride,
            column_stride,
            ..LaunchEnd::default()
        };
        if let Some(bases) = &case.bases {
            let table = self.on_device(bases.iter().map(|base| (at + base).to_ne_bytes()));
            end.base = case.base;
            end.bases = table.address();
            end.bases_bits = bases.iter().fold(0, |bits, base| bits | (at + base));
            keep.push(table);
        }
        let has_room = inline.len() + case.blocks.len() <= INLINE_BLOCKS;
        match case.ids {
            StridedIds::Identity => {}
            StridedIds::Inline if has_room => {
                end.block_ids = BlockIds::Inline;
                end.first_inline = u32::try_from(inline.len()).unwrap();
                inline.extend(&case.blocks);
            }
            StridedIds::Inline | StridedIds::Listed => {
                let list = self.on_device(case.blocks.iter().map(|block| block.to_ne_bytes()));
                end.block_ids = BlockIds::Listed;
                end.blocks = list.address();
                keep.push(list);
            }
        }
        end
    }

    /// Copies by the kernel and by the model, and compares all bytes of both ends.
    fn check(&self, case: &StridedCase, [from, to]: [StorageKind; 2], thread_blocks: u32) {
        let [source_bytes, mut expected] = fill(case);
        let source = self.filled(from, &source_bytes);
        let destination = self.filled(to, &expected);
        case.copy(&source_bytes, &mut expected);
        let (mut inline, mut keep) = (Vec::new(), Vec::new());
        let [pairs, layers, outers, rows, columns] = case.counts;
        let mut grid = GridLaunch {
            pairs,
            layers,
            outers,
            rows,
            columns,
            bytes: case.bytes,
            source: self.end(&case.source, source.address(), &mut inline, &mut keep),
            destination: self.end(&case.destination, destination.address(), &mut inline, &mut keep),
            ..GridLaunch::default()
        };
        grid.inline_blocks[..inline.len()].copy_from_slice(&inline);
        // SAFETY: all memory is alive until the stream has been synchronised, and no other code
        // uses it.
        unsafe { self.kernels.copy(&self.access.0, &grid, thread_blocks) }.unwrap();
        self.access.0.synchronize().unwrap();
        let written = self.read(&destination, expected.len());
        assert!(written == expected, "by {thread_blocks} blocks in {:?}: {case:?}", grid.width());
        assert!(self.read(&source, source_bytes.len()) == source_bytes, "the source: {case:?}");
    }
}

/// Random bytes for both ends.
fn fill(case: &StridedCase) -> [Vec<u8>; 2] {
    let mut random = Seeded::new(case.bytes);
    [case.source.length, case.destination.length].map(|length| {
        let words = (0..length.div_ceil(8)).flat_map(|_| random.next_u64().to_ne_bytes());
        words.take(length).collect()
    })
}

#[test]
fn grids_of_every_shape_are_copied() {
    let Some(context) = device("grids_of_every_shape_are_copied", LITTLE) else { return };
    let bench = Bench::new(&context);
    let [device, _] = bench.both_kinds();
    for seed in 0..200 {
        let mut random = Seeded::new(seed);
        // Every fourth is a multiple of 16, so that all widths occur.
        let bytes = match random.below(4) {
            0 => 16 << random.below(6),
            _ => u64::try_from(random.below(600)).unwrap() + 1,
        };
        let case = StridedCase::of_about(seed, 300, bytes);
        let thread_blocks = u32::try_from(random.below(300)).unwrap() + 1;
        bench.check(&case, [device, device], thread_blocks);
    }
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn grids_are_copied_from_and_to_pinned_memory() {
    let name = "grids_are_copied_from_and_to_pinned_memory";
    let Some(context) = device(name, LITTLE) else { return };
    let bench = Bench::new(&context);
    let [device, pinned] = bench.both_kinds();
    for seed in 1000..1040 {
        let bytes = [1, 7, 64, 600, 2048, 4096][usize::try_from(seed % 6).unwrap()];
        let case = StridedCase::of_about(seed, 100, bytes);
        for kinds in [[device, pinned], [pinned, device], [pinned, pinned]] {
            bench.check(&case, kinds, 32);
        }
    }
}

#[test]
fn long_cells_are_shared_by_all_thread_blocks() {
    let name = "long_cells_are_shared_by_all_thread_blocks";
    let Some(context) = device(name, LITTLE) else { return };
    let bench = Bench::new(&context);
    let [device, _] = bench.both_kinds();
    let cells = [(18_432, 16), (100 << 10, 16), (100_001, 1), (2048, 16), (2064, 8), (65_544, 8)];
    for (bytes, unit) in cells {
        for thread_blocks in [1, 24, 1000] {
            let case = StridedCase::new(bytes, [3, 2, 2, 1, 1], bytes, unit);
            bench.check(&case, [device, device], thread_blocks);
        }
    }
}

#[test]
fn rows_and_columns_change_places() {
    let Some(context) = device("rows_and_columns_change_places", LITTLE) else { return };
    let bench = Bench::new(&context);
    let [device, pinned] = bench.both_kinds();
    for (bytes, unit) in [(64, 16), (128, 16), (256, 16), (144, 16), (72, 8), (30, 2), (5, 1)] {
        for seed in 0..6 {
            let case = StridedCase::new(seed, [3, 2, 2, 16, 8], bytes, unit);
            bench.check(&case, [device, device], 64);
            bench.check(&case, [device, pinned], 64);
        }
    }
    let tokens = StridedCase::new(7, [5, 3, 2, 17, 5], 96, 16);
    bench.check(&tokens, [device, device], 264);
}

/// Words whose rows are contiguous at the source, and whose columns are contiguous at the destination.
/// Tiles are full, or end at the last row, the last column or both.
#[test]
fn elements_and_tokens_change_places() {
    let Some(context) = device("elements_and_tokens_change_places", LITTLE) else { return };
    let bench = Bench::new(&context);
    let [device, pinned] = bench.both_kinds();
    for bytes in [1, 2, 4, 8, 16_u64] {
        for [rows, columns] in [[256, 16], [16, 256], [70, 100], [300, 20], [3, 5000]] {
            let [high, wide] = [rows, columns].map(u64::from);
            // Pieces are apart by one cell, and outers lie outside of blocks.
            let piece = (high * wide + 1) * bytes;
            let end = |row, column, ids| StridedEnd {
                length: usize::try_from(4 * piece + bytes + 1).unwrap(),
                base: bytes,
                bases: None,
                ids,
                blocks: vec![1, 0],
                strides: [piece, 0, 2 * piece, row, column],
            };
            let case = StridedCase {
                counts: [2, 1, 2, rows, columns],
                bytes,
                source: end(bytes, high * bytes, StridedIds::Inline),
                destination: end(wide * bytes, bytes, StridedIds::Listed),
            };
            bench.check(&case, [device, device], 1000);
            bench.check(&case, [pinned, device], 3);
        }
    }
}

#[test]
fn offsets_beyond_four_gib_are_reached() {
    let needs = Needs { device: ByteCount::gib(6), ..LITTLE };
    let Some(context) = device("offsets_beyond_four_gib_are_reached", needs) else { return };
    let bench = Bench::new(&context);
    let stride = (1 << 32) + 4096_u64;
    let request = RegionRequest::new(ByteCount::new(stride + 4096)).aligned_to(Alignment::PAGE);
    let far = bench.device.allocate(&request).unwrap();
    let bytes: Vec<u8> = (0..=255).cycle().take(8192).collect();
    let [device, _] = bench.both_kinds();
    let near = bench.filled(device, &bytes);
    let back = bench.filled(device, &[0; 8192]);
    let packed = |place: &Place| LaunchEnd {
        base: place.address(),
        block_stride: 4096,
        ..LaunchEnd::default()
    };
    let scattered =
        LaunchEnd { base: far.address().get(), block_stride: stride, ..LaunchEnd::default() };
    let grid = GridLaunch { pairs: 2, bytes: 4096, ..GridLaunch::default() };
    let there = GridLaunch { source: packed(&near), destination: scattered, ..grid };
    let and_back = GridLaunch { source: scattered, destination: packed(&back), ..grid };
    for grid in [&there, &and_back] {
        // SAFETY: all memory is alive until the stream has been synchronised.
        unsafe { bench.kernels.copy(&bench.access.0, grid, 4) }.unwrap();
    }
    let mut seen = vec![0; 4096];
    let address = DeviceAddress::new(far.address().get() + stride);
    let beyond = Location::Device { device: context.device().id, address };
    // SAFETY: the last 4096 bytes of the region; the copies come before on the stream.
    unsafe { bench.access.read(beyond, &mut seen) }.unwrap();
    assert!(seen == bytes[4096..]);
    assert!(bench.read(&back, bytes.len()) == bytes);
}

#[test]
fn threads_launch_the_same_kernels() {
    let Some(context) = device("threads_launch_the_same_kernels", LITTLE) else { return };
    let kernels = Kernels::load(&context).unwrap();
    thread::scope(|scope| {
        for seed in 0..4 {
            let (context, kernels) = (&context, kernels.clone());
            scope.spawn(move || {
                let bench = Bench { kernels, ..Bench::new(context) };
                let [device, pinned] = bench.both_kinds();
                for round in 0..8 {
                    let case = StridedCase::of_about(seed * 100 + round, 200, 512);
                    bench.check(&case, [device, pinned], 8);
                }
            });
        }
    });
    drop(kernels);
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}

#[test]
fn an_invalid_launch_is_refused_and_writes_nothing() {
    let name = "an_invalid_launch_is_refused_and_writes_nothing";
    let Some(context) = device(name, LITTLE) else { return };
    let bench = Bench::new(&context);
    let [device, _] = bench.both_kinds();
    let (source, destination) = (bench.filled(device, &[1; 64]), bench.filled(device, &[2; 64]));
    let end = |place: &Place| LaunchEnd { base: place.address(), ..LaunchEnd::default() };
    let grid = GridLaunch {
        bytes: 64,
        source: end(&source),
        destination: end(&destination),
        ..GridLaunch::default()
    };
    let refusal = |grid: &GridLaunch, thread_blocks| {
        // SAFETY: a refused launch has no effect, and any other has 64 bytes at both ends.
        unsafe { bench.kernels.copy(&bench.access.0, grid, thread_blocks) }.err()
    };
    assert!(matches!(refusal(&grid, 0), Some(CudaError::NoThreadBlocks)));
    let many = GridLaunch { pairs: u32::MAX, ..grid };
    assert!(matches!(refusal(&many, 1), Some(CudaError::TooManyCells { .. })));
    let mut inline = GridLaunch { pairs: 300, ..grid };
    inline.source.block_ids = BlockIds::Inline;
    assert!(matches!(refusal(&inline, 1), Some(CudaError::InlineBlocks { pairs: 300, .. })));
    assert!(refusal(&GridLaunch { rows: 0, ..grid }, 1).is_none(), "nothing to copy");
    assert!(refusal(&GridLaunch { bytes: 0, ..grid }, 1).is_none(), "nothing to copy");
    assert_eq!(bench.read(&destination, 64), [2; 64]);
    assert!(refusal(&grid, 1).is_none());
    assert_eq!(bench.read(&destination, 64), [1; 64]);
}

#[test]
fn compiled_kernels_fit_their_registers_and_block_size() {
    let name = "compiled_kernels_fit_their_registers_and_block_size";
    let Some(context) = device(name, LITTLE) else { return };
    let kernels = Kernels::load(&context).unwrap();
    let figures = kernels.figures().unwrap();
    assert_eq!(figures.len(), 15);
    for figures in figures {
        eprintln!("{figures:?}");
        assert_eq!(figures.local_bytes, 0, "{} does not fit into registers", figures.name);
        assert!(figures.most_threads >= 512, "{} runs in no block of 512", figures.name);
    }
    // Loaded, unloaded and loaded again.
    drop(kernels);
    drop(Kernels::load(&context).unwrap());
    assert_eq!((context.failed_drops(), context.lost()), (0, None));
}
