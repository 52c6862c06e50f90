//! Regions that were adopted as registered are not registered again.

use terrane_core::{AgentName, Region, Register};
use terrane_layout::{LayoutBuilder, LayoutConfig};

fn wrong(config: LayoutConfig, agent: AgentName, region: Region, registrar: &dyn Register) {
    let builder = LayoutBuilder::new(config).fully_contiguous();
    let _ = builder.adopt_registered(agent, [region]).register(registrar);
}

fn main() {}
