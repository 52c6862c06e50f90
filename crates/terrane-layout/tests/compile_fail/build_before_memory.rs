//! A layout needs memory.

use terrane_layout::{LayoutBuilder, LayoutConfig};

fn wrong(config: LayoutConfig) {
    let _ = LayoutBuilder::new(config).fully_contiguous().build();
}

fn main() {}
