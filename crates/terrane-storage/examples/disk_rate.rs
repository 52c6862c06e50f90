//! Measures the rate at which the queue reads and writes a file, beside fio on the same file.
//!
//! `cargo run --release -p terrane-storage --example disk_rate -- DIRECTORY [MiB] [rounds] [depth]`
//!
//! The queue runs with threads, with io_uring, and with io_uring and registered memory. Square
//! brackets contain the processor time of the calling thread, in seconds for each GB.
//!
//! Runs alternate and medians are printed, because rates of disks vary. It needs fio.

#![allow(clippy::print_stdout, reason = "printing is what an example is for")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use terrane_core::{ByteCount, Memory, RegionRequest};
use terrane_storage::{
    DiskFile, DiskOptions, HugePages, IoBackend, IoBuffer, IoFile, IoMemory, IoQueue,
    IoQueueOptions, IoRequest, SystemAllocator, SystemMemory, SystemOptions,
};

type Failure = Box<dyn Error>;

/// The arrangement of a request's bytes in memory.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    request: u64,
    piece: u64,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "1 MiB, contiguous", request: 1 << 20, piece: 1 << 20 },
    Shape { name: "4 MiB, contiguous", request: 4 << 20, piece: 4 << 20 },
    Shape { name: "61 pieces of 18,432 bytes", request: 61 * 18_432, piece: 18_432 },
];

/// How a pass transfers bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Threads,
    Ring,
    Registered,
}

impl Mode {
    const ALL: [Self; 3] = [Self::Threads, Self::Ring, Self::Registered];
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().ok_or("name a directory on the disk")?);
    let mut numbers = arguments.map_while(|argument| argument.parse::<u32>().ok());
    let size = ByteCount::mib(numbers.next().unwrap_or(1024));
    let rounds = numbers.next().unwrap_or(5);
    let depth = numbers.next().unwrap_or(16);

    let path = directory.join("terrane-disk-rate");
    let file = DiskFile::create_new(&path, size, &DiskOptions::default())?;
    let result = compare(&file, &path, rounds, depth);
    std::fs::remove_file(&path)?;
    result
}

fn compare(file: &DiskFile, path: &Path, rounds: u32, depth: u32) -> Result<(), Failure> {
    println!("{}", file.capabilities());
    for (pages, shape) in
        [HugePages::default(), HugePages::None].into_iter().flat_map(|p| SHAPES.map(|s| (p, s)))
    {
        println!("{pages:?}, {}:", shape.name);
        let options = SystemOptions { huge_pages: pages, ..SystemOptions::default() };
        let allocator = SystemAllocator::new(options);
        let slot = shape.request * 2;
        let memory = allocator
            .allocate_memory(&RegionRequest::new(ByteCount::new(slot * u64::from(depth))))?;
        // The first pass writes blocks that were only reserved; it is a warm-up.
        run(file, &memory, shape, true, depth, Mode::Ring)?;
        for is_write in [true, false] {
            let mut fios = Vec::new();
            let mut passes = Mode::ALL.map(|mode| (mode, Vec::new(), Vec::new()));
            for _ in 0..rounds {
                fios.push(fio(path, shape, is_write, depth, file.length())?);
                for (mode, rates, seconds) in &mut passes {
                    let (rate, used) = run(file, &memory, shape, is_write, depth, *mode)?;
                    rates.push(rate);
                    seconds.push(used);
                }
            }
            let fio = median(fios);
            print!("    {}: fio {fio:.3} GB/s", if is_write { "write" } else { "read" });
            for (mode, rates, seconds) in passes {
                let (rate, used) = (median(rates), median(seconds));
                print!(", {mode:?} {rate:.3} ({:.3}) [{used:.4}]", rate / fio);
            }
            println!();
        }
    }
    Ok(())
}

/// One pass over the file; GB/s, and seconds of processor time for each GB.
fn run(
    file: &DiskFile,
    memory: &SystemMemory,
    shape: Shape,
    is_write: bool,
    depth: u32,
    mode: Mode,
) -> Result<(f64, f64), Failure> {
    let handle = file.handle();
    let target = IoFile::direct(&handle).ok_or("this file system has no direct I/O")?;
    let backend = if mode == Mode::Threads { IoBackend::Threads } else { IoBackend::IoUring };
    let threads = usize::try_from(depth)?;
    let options = IoQueueOptions { depth, backend, threads, ..IoQueueOptions::default() };
    let slots: Vec<Vec<IoBuffer>> = (0..u64::from(depth))
        .map(|slot| pieces(memory, shape, slot))
        .collect::<Option<_>>()
        .ok_or("memory")?;
    let mut free: Vec<usize> = (0..slots.len()).collect();
    let requests = file.length().get() / shape.request;
    let mut completions = Vec::new();

    let mut queue = IoQueue::new(&options)?;
    let region =
        IoBuffer { address: memory.location().as_host().ok_or("memory")?, length: memory.length() };
    // SAFETY: `memory` exists until the return, and keeps its pages.
    let region = unsafe { IoMemory::new(region) };
    let region = (mode == Mode::Registered).then_some(&region);
    let (begin, used) = (Instant::now(), processor_seconds()?);
    let (mut next, mut done) = (0, 0);
    while done < requests {
        while next < requests
            && let Some(slot) = free.pop()
        {
            let offset = ByteCount::new(next * shape.request);
            let buffers = slots.get(slot).ok_or("slot")?;
            let token = u64::try_from(slot)?;
            let request = if is_write {
                IoRequest::write(token, target, offset, buffers)
            } else {
                IoRequest::read(token, target, offset, buffers)
            };
            let request = request.within(region);
            // SAFETY: the memory and the file outlive the queue. One request at a time uses each
            // slot's memory, and no other code does.
            unsafe { queue.submit(&request) }?;
            next += 1;
        }
        queue.wait(None, &mut completions)?;
        for completion in completions.drain(..) {
            completion.outcome?;
            free.push(usize::try_from(completion.token)?);
            done += 1;
        }
    }
    let gigabytes = (requests * shape.request) as f64 / 1e9;
    let used = processor_seconds()? - used;
    Ok((gigabytes / begin.elapsed().as_secs_f64(), used / gigabytes))
}

/// The processor time of this thread so far.
fn processor_seconds() -> Result<f64, Failure> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds: f64 = text.split(' ').next().ok_or("schedstat")?.parse()?;
    Ok(nanoseconds / 1e9)
}

/// The pieces of one slot: every other one of its memory, so that no two are adjacent.
fn pieces(memory: &SystemMemory, shape: Shape, slot: u64) -> Option<Vec<IoBuffer>> {
    let base = memory.location().as_host()?;
    let first = slot * shape.request * 2;
    (0..shape.request / shape.piece)
        .map(|piece| {
            let address = base.checked_add(ByteCount::new(first + 2 * piece * shape.piece))?;
            Some(IoBuffer { address, length: ByteCount::new(shape.piece) })
        })
        .collect()
}

/// The same pass by fio; GB/s.
fn fio(
    path: &Path,
    shape: Shape,
    is_write: bool,
    depth: u32,
    size: ByteCount,
) -> Result<f64, Failure> {
    let size = size.get() / shape.request * shape.request;
    let output = Command::new("fio")
        .args(["--name=rate", "--ioengine=io_uring", "--direct=1", "--overwrite=1"])
        .args(["--output-format=terse", "--terse-version=3"])
        .arg(format!("--rw={}", if is_write { "write" } else { "read" }))
        .arg(format!("--bs={}", shape.request))
        .arg(format!("--iodepth={depth}"))
        .arg(format!("--size={size}"))
        .arg(format!("--filename={}", path.display()))
        .output()?;
    let text = String::from_utf8(output.stdout)?;
    // Fields 7 and 48 of terse version 3: KiB/s read and written.
    let field = text.split(';').nth(if is_write { 47 } else { 6 });
    let kib: f64 = field.ok_or_else(|| format!("fio said {text:?}"))?.parse()?;
    Ok(kib * 1024.0 / 1e9)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
