//! Draws the bytes of one block: `cargo run --example picture [FILE.svg]`.
//!
//! The text goes to standard output, and the SVG to the file.

#![allow(clippy::print_stdout, reason = "an example writes what it finds")]

use std::error::Error;

use terrane_layout::formats::vllm::PackedOrder;
use terrane_layout::formats::{sglang, vllm};
use terrane_layout::{ElementFormat, LayoutConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let config = LayoutConfig::builder()
        .num_blocks(100)
        .num_layers(2)
        .outer_dim(2)
        .page_size(2)
        .inner_dim(2 * 128)
        .num_heads(2)
        .element(ElementFormat::Width(2))
        .build()?;
    let host = sglang::page_head(&config)?.picture();
    println!("SGLang, page_head:\n{host}");
    let device = vllm::packed(&config, PackedOrder::Lbnhc)?.picture();
    println!("vLLM, LBNHC:\n{device}");
    if let Some(path) = std::env::args_os().nth(1) {
        std::fs::write(path, device.to_svg())?;
    }
    Ok(())
}
