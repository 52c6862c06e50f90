//! The kernels' own source, compiled for the host and run there thread by thread, against the
//! model of strided copies. Needs a C++ compiler, and says so where there is none.

use std::ffi::c_void;
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;

use libloading::Library;
use terrane_core::ByteCount;
use terrane_testkit::random::Seeded;
use terrane_testkit::strided::{StridedCase, StridedEnd, StridedIds};

use super::{BlockIds, CopyWidth, GridLaunch, LaunchEnd, LaunchRun, RunLaunch};
use crate::kernels::schedule::GridSchedule;

type OnHost = unsafe extern "C" fn(*const c_void, *const c_void, u32) -> u64;

/// The kernels, compiled once, or nothing after having said what is missing.
fn kernels(test: &str) -> Option<&'static Library> {
    static COMPILED: OnceLock<Result<Library, String>> = OnceLock::new();
    match COMPILED.get_or_init(compile) {
        Ok(library) => Some(library),
        Err(reason) => {
            eprintln!("skipped: {test}: {reason}");
            None
        }
    }
}

/// Fails only where there is no compiler.
fn compile() -> Result<Library, String> {
    let folder = tempfile::tempdir().unwrap();
    let (source, library) = (folder.path().join("copy.cpp"), folder.path().join("copy.so"));
    let parts =
        [include_str!("on_host.cpp"), include_str!("copy.cu"), include_str!("on_host_entry.cpp")];
    std::fs::write(&source, parts.concat()).unwrap();
    let output = Command::new("c++")
        .args(["-std=c++17", "-O1", "-shared", "-fPIC", "-fno-strict-aliasing", "-w", "-o"])
        .args([&library, &source])
        .output()
        .map_err(|error| format!("no C++ compiler ({error})"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the library has no initialisers.
    Ok(unsafe { Library::new(&library) }.unwrap())
}

fn launch<A, B>(
    kernels: &Library,
    name: &str,
    width: CopyWidth,
    blocks: u32,
    (first, second): (&A, &B),
) {
    let name = format!("terrane_{name}_{}_on_host", width.bytes());
    // SAFETY: the functions of these names have this type.
    let function = unsafe { kernels.get::<OnHost>(name.as_bytes()) }.unwrap();
    let (first, second) = (ptr::from_ref(first).cast(), ptr::from_ref(second).cast());
    // SAFETY: the arguments are those of the kernel, and what they say lies within live buffers.
    let unaligned = unsafe { function(first, second, blocks) };
    assert_eq!(unaligned, 0, "words that are not at multiples of {width:?}");
}

/// Bytes that begin at a multiple of 16, and their address.
struct Buffer {
    words: Vec<u128>,
    length: usize,
}

impl Buffer {
    fn new(length: usize, mut byte: impl FnMut() -> u8) -> Self {
        let words = (0..length.div_ceil(16))
            .map(|_| u128::from_ne_bytes(std::array::from_fn(|_| byte())))
            .collect();
        Self { words, length }
    }

    fn address(&mut self) -> u64 {
        ByteCount::from_usize(self.words.as_mut_ptr().expose_provenance()).get()
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.truncate(self.length);
        bytes
    }
}

/// An end as the kernel takes it, and what it points to.
fn end_of(
    case: &StridedEnd,
    address: u64,
    inline: &mut Vec<u32>,
    keep: &mut Vec<Vec<u64>>,
    lists: &mut Vec<Vec<u32>>,
) -> LaunchEnd {
    let [block_stride, layer_stride, outer_stride, row_stride, column_stride] = case.strides;
    let mut end = LaunchEnd {
        base: address + case.base,
        block_stride,
        layer_stride,
        outer_stride,
        row_stride,
        column_stride,
        ..LaunchEnd::default()
    };
    let exposed = |address: usize| ByteCount::from_usize(address).get();
    if let Some(bases) = &case.bases {
        let bases: Vec<u64> = bases.iter().map(|base| address + base).collect();
        end.base = case.base;
        end.bases = exposed(bases.as_ptr().expose_provenance());
        end.bases_bits = bases.iter().fold(0, |bits, base| bits | base);
        keep.push(bases);
    }
    match case.ids {
        StridedIds::Identity => {}
        StridedIds::Inline if inline.len() + case.blocks.len() <= super::INLINE_BLOCKS => {
            end.block_ids = BlockIds::Inline;
            end.first_inline = u32::try_from(inline.len()).unwrap();
            inline.extend(&case.blocks);
        }
        _ => {
            let list = case.blocks.clone();
            end.block_ids = BlockIds::Listed;
            end.blocks = exposed(list.as_ptr().expose_provenance());
            lists.push(list);
        }
    }
    end
}

/// Runs the case by the kernel and by the model, and compares all bytes of both buffers.
fn check_grid(kernels: &Library, case: &StridedCase, blocks: u32, widths: &mut [u32; 5]) {
    let mut random = Seeded::new(case.bytes);
    let mut byte = || random.next_u64().to_ne_bytes()[3];
    let mut source = Buffer::new(case.source.length, &mut byte);
    let mut destination = Buffer::new(case.destination.length, &mut byte);
    let (before, mut expected) = (source.bytes(), destination.bytes());
    case.copy(&before, &mut expected);

    let (mut inline, mut keep, mut lists) = (Vec::new(), Vec::new(), Vec::new());
    let [pairs, layers, outers, rows, columns] = case.counts;
    let mut grid = GridLaunch {
        pairs,
        layers,
        outers,
        rows,
        columns,
        bytes: case.bytes,
        source: end_of(&case.source, source.address(), &mut inline, &mut keep, &mut lists),
        destination: end_of(
            &case.destination,
            destination.address(),
            &mut inline,
            &mut keep,
            &mut lists,
        ),
        ..GridLaunch::EMPTY
    };
    grid.inline_blocks[..inline.len()].copy_from_slice(&inline);
    let width = grid.width();
    widths[usize::from(width.index())] += 1;
    let schedule = GridSchedule::of(&grid, width).unwrap().unwrap();
    launch(kernels, "grid_copy", width, schedule.blocks(blocks), (&grid, &schedule));
    assert!(destination.bytes() == expected, "{case:?} by {blocks} blocks in {width:?}");
    assert!(source.bytes() == before, "the source was written: {case:?}");
}

#[test]
fn grids_are_copied_as_the_model_says() {
    let Some(kernels) = kernels("grids_are_copied_as_the_model_says") else { return };
    let mut widths = [0; 5];
    for seed in 0..400 {
        let mut random = Seeded::new(seed);
        let bytes = match random.below(4) {
            0 => 16 << random.below(6),
            _ => u64::try_from(random.below(600)).unwrap() + 1,
        };
        let case = StridedCase::of_about(seed, 300, bytes);
        check_grid(kernels, &case, u32::try_from(random.below(3)).unwrap() + 1, &mut widths);
    }
    for (seed, bytes) in [(1, 18_432), (2, 100 << 10), (3, 100_001), (4, 4096 + 16), (5, 8200)] {
        for blocks in [1, 7] {
            let case = StridedCase::new(seed, [3, 2, 2, 1, 1], bytes, 8);
            check_grid(kernels, &case, blocks, &mut widths);
        }
    }
    for (seed, bytes) in [(6, 64), (7, 128), (8, 256), (9, 144), (10, 72)] {
        let case = StridedCase::new(seed, [3, 2, 2, 16, 8], bytes, 16);
        check_grid(kernels, &case, 5, &mut widths);
    }
    assert!(widths.iter().all(|&times| times > 10), "{widths:?}");
}

#[test]
fn runs_are_copied_one_and_all() {
    let Some(kernels) = kernels("runs_are_copied_one_and_all") else { return };
    for seed in 0..100 {
        let mut random = Seeded::new(seed);
        let unit = 1_usize << random.below(5);
        let longest = [8, 64, 3000][random.below(3)];
        let mut offsets = [0, 0];
        let mut runs: Vec<([usize; 2], usize)> = (0..1 + random.below(80))
            .map(|_| {
                let bytes = unit * random.below(longest / unit + 2);
                let at = offsets;
                offsets = offsets.map(|offset| offset + bytes + unit * random.below(3));
                (at, bytes)
            })
            .collect();
        random.shuffle(&mut runs);
        let mut byte = || random.next_u64().to_ne_bytes()[5];
        let mut source = Buffer::new(offsets[0] + 1, &mut byte);
        let mut destination = Buffer::new(offsets[1] + 1, &mut byte);
        let (before, mut expected) = (source.bytes(), destination.bytes());
        let addresses = [source.address(), destination.address()];
        let mut list = Vec::new();
        for &([from, to], bytes) in &runs {
            expected[to..to + bytes].copy_from_slice(&before[from..from + bytes]);
            list.push(LaunchRun {
                source: addresses[0] + ByteCount::from_usize(from).get(),
                destination: addresses[1] + ByteCount::from_usize(to).get(),
                bytes: ByteCount::from_usize(bytes).get(),
                first_tile: 0,
            });
        }
        let mut copy = RunLaunch::arrange(&mut list).unwrap();
        copy.runs = ByteCount::from_usize(list.as_ptr().expose_provenance()).get();
        let width = CopyWidth::ALL.into_iter().find(|width| copy.width == u32::from(width.bytes()));
        for most in [1, 3, 1000] {
            let (blocks, share) = copy.shares(most);
            launch(kernels, "run_copy", width.unwrap(), blocks, (&copy, &share));
            assert!(destination.bytes() == expected, "{seed} by {blocks} blocks: {runs:?}");
        }
    }
}
