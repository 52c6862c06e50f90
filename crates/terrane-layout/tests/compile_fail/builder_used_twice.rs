//! Every step consumes the builder.

use terrane_layout::{LayoutBuilder, LayoutConfig};

fn wrong(config: LayoutConfig) {
    let builder = LayoutBuilder::new(config);
    let _ = builder.fully_contiguous();
    let _ = builder.fully_contiguous();
}

fn main() {}
