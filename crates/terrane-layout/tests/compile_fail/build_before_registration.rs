//! Registration is the caller's choice, and has no default.

use terrane_core::Region;
use terrane_layout::{LayoutBuilder, LayoutConfig};

fn wrong(config: LayoutConfig, region: Region) {
    let _ = LayoutBuilder::new(config).fully_contiguous().adopt([region]).build();
}

fn main() {}
