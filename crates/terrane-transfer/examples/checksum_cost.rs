//! Measures transfers to and from a file with checksums of all blocks, beside the same transfers
//! without checksums.
//!
//! ```text
//! cargo run --release -p terrane-transfer --features checksum --example checksum_cost -- \
//!     FOLDER [BLOCKS]
//! ```
//!
//! The folder is on the disk to measure. Rounds alternate, and the figures are medians of five. On
//! a busy machine, the processor time is more reliable than the elapsed time.

#![expect(clippy::print_stdout, reason = "an example shows its output")]

use std::error::Error;
use std::time::Instant;

use terrane_core::Durability;
use terrane_layout::{
    BlockDimension, ElementFormat, LayoutBuilder, LayoutConfig, LayoutKind, TokenOrder,
};
use terrane_storage::{DiskAllocator, DiskOptions, SystemAllocator, SystemOptions};
use terrane_transfer::{Checksums, Endpoint, Transfer, TransferManager};

const ROUNDS: usize = 5;

/// K and V of 32 layers of 16 tokens of 8 heads of 128 numbers of 2 bytes: 2 MiB a block.
fn config(blocks: u32, order: TokenOrder) -> Result<LayoutConfig, Box<dyn Error>> {
    let config = LayoutConfig::builder().num_blocks(blocks).num_layers(32).outer_dim(2);
    let config = config.page_size(16).inner_dim(8 * 128).element(ElementFormat::Width(2));
    Ok(config.num_heads(8).token_order(order).build()?)
}

/// The processor time of all threads, in seconds.
fn processor_time() -> Result<f64, Box<dyn Error>> {
    let mut nanoseconds = 0.0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().unwrap_or_default().parse::<f64>()?;
    }
    Ok(nanoseconds / 1e9)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("name a folder on the disk to measure")?;
    let blocks: u32 = arguments.next().map_or(Ok(256), |text| text.parse())?;
    let system = SystemAllocator::new(SystemOptions::default());
    let disk = DiskAllocator::new(folder.as_ref(), DiskOptions::default())?;
    let manager = TransferManager::with_default_engines()?;
    let apart = LayoutKind::LayerSeparate { block_dimension: BlockDimension::First };
    let (tokens, heads) = (TokenOrder::TokenMajor, TokenOrder::HeadMajor);
    let contiguous = LayoutKind::FullyContiguous;
    let cases = [
        ("contiguous blocks", contiguous, tokens, tokens),
        ("layers apart", apart, tokens, tokens),
        ("head-major, pieces of 256 bytes, stored in canonical order", apart, heads, tokens),
        ("head-major, pieces of 256 bytes, stored as they are", apart, heads, heads),
    ];
    let ids: Vec<u32> = (0..blocks).collect();
    for (name, kind, order, stored_order) in cases {
        let stored = LayoutBuilder::new(config(blocks, stored_order)?).kind(contiguous);
        let stored = Endpoint::new(stored.allocate(&disk).unregistered().build()?)?;
        let memory = LayoutBuilder::new(config(blocks, order)?).kind(kind).allocate(&system);
        let memory = Endpoint::new(memory.unregistered().build()?)?;
        let mut sums = None;
        for to_disk in [true, false] {
            let ends = if to_disk { [&memory, &stored] } else { [&stored, &memory] };
            let mut run = |with: bool| -> Result<[f64; 2], Box<dyn Error>> {
                let [from, to] = ends;
                let mut transfer = Transfer::new(from, to).blocks(&ids, &ids);
                if to_disk {
                    transfer = transfer.durability(Durability::Data);
                }
                if with {
                    transfer = transfer.checksums(match &sums {
                        Some(sums) if !to_disk => Checksums::Verify(Clone::clone(sums)),
                        _ => Checksums::Compute,
                    });
                }
                let (begun, used) = (Instant::now(), processor_time()?);
                let report = manager.submit(transfer, ())?.wait().result?;
                let took = begun.elapsed().as_secs_f64();
                let used = processor_time()? - used;
                if let Some(found) = report.checksums.filter(|_| to_disk) {
                    sums = Some(found.into());
                }
                Ok([took, used])
            };
            run(true)?;
            run(false)?;
            let mut times = [(); 2].map(|()| [(); 2].map(|()| Vec::new()));
            for _ in 0..ROUNDS {
                for (with, times) in [false, true].into_iter().zip(&mut times) {
                    times.iter_mut().zip(run(with)?).for_each(|(times, time)| times.push(time));
                }
            }
            let median = |times: &mut Vec<f64>| {
                times.sort_by(f64::total_cmp);
                times.get(ROUNDS / 2).copied().unwrap_or(f64::NAN)
            };
            let [[without, used_without], [with, used_with]] =
                times.each_mut().map(|times| times.each_mut().map(median));
            let bytes = f64::from(blocks) * 2.0 * f64::from(1 << 20);
            let direction = if to_disk { "to disk" } else { "from disk, verified" };
            println!(
                "{name}, {direction}: {:.2} GB/s without, {:.2} GB/s with; time {:.3} of that without, \
                 processor time {:.3}",
                bytes / without / 1e9,
                bytes / with / 1e9,
                with / without,
                used_with / used_without,
            );
        }
    }
    Ok(())
}
