//! A layout needs a kind.

use terrane_layout::{LayoutBuilder, LayoutConfig};

fn wrong(config: LayoutConfig) {
    let _ = LayoutBuilder::new(config).build();
}

fn main() {}
