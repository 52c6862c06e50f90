//! The kind is chosen once.

use terrane_layout::{BlockDimension, LayoutBuilder, LayoutConfig};

fn wrong(config: LayoutConfig) {
    let _ = LayoutBuilder::new(config).fully_contiguous().layer_separate(BlockDimension::First);
}

fn main() {}
