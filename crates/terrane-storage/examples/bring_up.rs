//! Measures the rate at which one and several threads touch new system memory, and the rate at
//! which they fill allocated memory. The second is the limit: the kernel cannot zero pages faster.
//!
//! `cargo run --release -p terrane-storage --example bring_up -- [GiB] [rounds]`

#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::num::NonZeroUsize;
use std::time::Instant;

use terrane_core::{ByteCount, Memory, RegionRequest, Requirement};
use terrane_storage::{
    FirstTouch, HugePages, StorageError, SystemAllocator, SystemMemory, SystemOptions,
};

fn main() -> Result<(), StorageError> {
    let mut arguments = std::env::args().skip(1).map_while(|argument| argument.parse().ok());
    let gib = arguments.next().unwrap_or(4);
    let rounds = arguments.next().unwrap_or(5);
    let cores = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);

    for (name, huge_pages) in [
        ("base pages", HugePages::None),
        ("transparent huge pages", HugePages::Transparent(Requirement::Preferred)),
    ] {
        let (mut one, mut all) = (Vec::new(), Vec::new());
        let (mut fill_one, mut fill_all) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            for (threads, times, fills) in
                [(NonZeroUsize::MIN, &mut one, &mut fill_one), (cores, &mut all, &mut fill_all)]
            {
                let (seconds, memory) = allocate(gib, huge_pages, threads)?;
                times.push(seconds);
                fills.push(fill(&memory, threads));
            }
        }
        for (what, one, all) in [("allocated", one, all), ("filled", fill_one, fill_all)] {
            let (one, all) = (median(one), median(all));
            println!(
                "{name}: {gib} GiB {what} in {one:.3} s with one thread, {all:.3} s with {cores}: \
                 {:.2} times as fast",
                one / all
            );
        }
    }
    Ok(())
}

fn allocate(
    gib: u32,
    huge_pages: HugePages,
    threads: NonZeroUsize,
) -> Result<(f64, SystemMemory), StorageError> {
    let options = SystemOptions {
        huge_pages,
        first_touch: FirstTouch::Threads(threads),
        ..SystemOptions::default()
    };
    let allocator = SystemAllocator::new(options);
    let request = RegionRequest::new(ByteCount::gib(gib)).labelled("example");
    let begin = Instant::now();
    let memory = allocator.allocate_memory(&request)?;
    Ok((begin.elapsed().as_secs_f64(), memory))
}

/// Fills the memory, one part for each thread. Returns the seconds.
fn fill(memory: &SystemMemory, threads: NonZeroUsize) -> f64 {
    let begin = Instant::now();
    if let Some(base) = memory.location().as_host() {
        let length = memory.length().to_usize();
        // SAFETY: the memory is live and initialised, and nothing else uses it meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), length) };
        std::thread::scope(|scope| {
            for part in bytes.chunks_mut(length.div_ceil(threads.get())) {
                scope.spawn(|| part.fill(0));
            }
        });
    }
    begin.elapsed().as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
