//! Copies blocks of an engine's cache to a file and back.
//!
//! `cargo run --release --example quickstart`

#![allow(clippy::print_stdout, reason = "an example prints what it did")]

use terrane::prelude::*;

const BLOCKS: u32 = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Llama 3.1 8B: 32 layers of K and V, 8 heads of 128 elements of 2 bytes, 16 tokens a block.
    let config = LayoutConfig::builder()
        .num_blocks(BLOCKS)
        .num_layers(32)
        .outer_dim(2)
        .page_size(16)
        .inner_dim(8 * 128)
        .element(ElementFormat::Width(2))
        .build()?;

    // The cache of an engine: a tensor [2, blocks, 16, 8, 128] for each layer, in its own memory.
    let tensor_bytes = config.total_bytes().to_usize() / 32;
    let tensors = (0..32).map(|_| HostBytes::from(vec![0; tensor_bytes]));
    let cache = LayoutBuilder::new(config)
        .layer_separate(BlockDimension::Second)
        .adopt_memory(tensors)
        .unregistered()
        .build()?;
    // A file of whole blocks.
    let disk = DiskAllocator::new(&std::env::temp_dir(), DiskOptions::default())?;
    let file =
        LayoutBuilder::new(config).fully_contiguous().allocate(&disk).unregistered().build()?;
    let (cache, file) = (Endpoint::new(cache)?, Endpoint::new(file)?);

    let manager = TransferManager::with_default_engines()?;
    let blocks: Vec<u32> = (0..BLOCKS).collect();
    let offload = Transfer::new(&cache, &file).blocks(&blocks, &blocks);
    println!("{}", manager.explain(&offload)?);
    let offload = manager.submit(offload, ())?;

    // The copy back starts when the copy to the file has succeeded.
    let onload = Transfer::new(&file, &cache).blocks(&blocks, &blocks).after(&offload.ticket());
    let onload = manager.submit(onload, ())?;
    println!("out:  {}", offload.wait().result?);
    println!("back: {}", onload.wait().result?);
    Ok(())
}
