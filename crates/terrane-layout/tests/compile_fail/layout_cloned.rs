//! A layout has one owner, which tracks its transfers.

use terrane_layout::PhysicalLayout;

fn wrong(layout: &PhysicalLayout) -> PhysicalLayout {
    layout.clone()
}

fn main() {}
