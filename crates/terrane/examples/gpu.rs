//! Copies KV blocks from a device to pinned memory, to a file and back, and verifies every byte.
//!
//! `cargo run --release --example gpu` on a machine with NVIDIA's driver

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints what it did")]

use std::fs;
use std::process::ExitCode;

use terrane::prelude::*;

fn main() -> ExitCode {
    let Err(error) = run() else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    ExitCode::FAILURE
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let context = Context::primary(DeviceId::new(0))?;
    let manager = TransferManager::builder().devices([&context])?.build();
    // The stream of the model. `Stream::borrow` adopts a stream of another library.
    let compute = Stream::new(&context)?;

    // 4 layers of K and V, 8 heads of 128 elements of 2 bytes, 16 tokens a block, 24 blocks.
    let model = LayoutConfig::builder().num_layers(4).outer_dim(2).page_size(16).inner_dim(1024);
    let config = model.element(ElementFormat::Width(2)).num_blocks(24).build()?;
    let whole_blocks = || LayoutBuilder::new(config).fully_contiguous();
    // The first 8 blocks of the file represent the output of the model.
    let computed: Vec<u8> = (0..=250).cycle().take(config.total_bytes().to_usize() / 3).collect();
    let path = std::env::temp_dir().join(format!("terrane-gpu-{}", std::process::id()));
    fs::write(&path, [&computed[..], &vec![0; 2 * computed.len()]].concat())?;
    let file = DiskFile::open_existing(&path, config.total_bytes(), &DiskOptions::default())?;
    let file = Endpoint::new(whole_blocks().adopt_memory([file]).unregistered().build()?)?;
    let pinned = PinnedAllocator::new(&context, PinnedOptions::default())?;
    let pinned = Endpoint::new(whole_blocks().allocate(&pinned).unregistered().build()?)?;
    let cache = LayoutBuilder::new(config).layer_separate(BlockDimension::Second);
    let cache = cache.allocate(&DeviceAllocator::new(&context)).unregistered().build()?;
    let cache = Endpoint::new(cache)?;
    let ids: Vec<u32> = (0..24).collect();
    let [first, second, third] = [&ids[..8], &ids[8..16], &ids[16..]];
    for (from, from_blocks, to, to_blocks) in [
        (&file, first, &cache, first),
        (&cache, first, &pinned, second),
        (&pinned, second, &file, second),
        (&file, second, &pinned, third),
        (&pinned, third, &cache, third),
        (&cache, third, &file, third),
    ] {
        let mut copy = Transfer::new(from, to).blocks(from_blocks, to_blocks);
        if from.kind().is_device() || to.kind().is_device() {
            // Copy after the work that the model has submitted to its stream. The order keeps the
            // stream alive.
            copy = copy.device_order(compute.order());
        }
        println!("{} to {}: {}", from.kind(), to.kind(), manager.submit(copy, ())?.wait().result?);
    }
    let found = fs::read(&path)?;
    fs::remove_file(&path)?;
    let is_same = found.chunks(computed.len()).all(|blocks| blocks == computed);
    if is_same { Ok(()) } else { Err("the blocks have changed on their way".into()) }
}
