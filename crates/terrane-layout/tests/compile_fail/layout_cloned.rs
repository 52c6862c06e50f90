//! A layout has one owner, who tracks what is in flight.

use terrane_layout::PhysicalLayout;

fn wrong(layout: &PhysicalLayout) -> PhysicalLayout {
    layout.clone()
}

fn main() {}
