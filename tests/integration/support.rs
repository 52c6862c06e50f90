//! The setup of these tests.

use terrane::core::Allocate;
use terrane::layout::model::{ModelGeometry, ModelOptions};
use terrane::layout::{LayoutBuilder, LayoutConfig, LayoutError, LayoutKind, PhysicalLayout};
use terrane::transfer::{Endpoint, Report, Transfer, TransferManager};

/// A small model with grouped heads and 16-bit elements, as a hub's `config.json`.
const MODEL: &str = r#"{
    "model_type": "qwen3", "torch_dtype": "bfloat16", "num_hidden_layers": 6,
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64
}"#;

/// The config of that model's blocks, of 16 tokens each: 6 layers of 2 · 4 KiB, 48 KiB in total.
pub fn config(num_blocks: u32) -> LayoutConfig {
    let model = ModelGeometry::from_json(MODEL, &ModelOptions::default()).unwrap();
    let configs = model.layout_configs(num_blocks, 16).unwrap();
    assert_eq!(configs.len(), 1, "all layers are in one group");
    configs[0]
}

pub fn layout<A: Allocate>(
    num_blocks: u32,
    kind: LayoutKind,
    allocator: &A,
) -> Result<PhysicalLayout, LayoutError> {
    LayoutBuilder::new(config(num_blocks)).kind(kind).allocate(allocator).unregistered().build()
}

pub fn endpoint<A: Allocate>(num_blocks: u32, kind: LayoutKind, allocator: &A) -> Endpoint {
    Endpoint::new(layout(num_blocks, kind, allocator).unwrap()).unwrap()
}

/// Copies blocks and waits for them.
pub fn copy_blocks(
    manager: &TransferManager,
    (source, from): (&Endpoint, &[u32]),
    (destination, to): (&Endpoint, &[u32]),
) -> Report {
    let transfer = Transfer::new(source, destination).blocks(from, to);
    manager.submit(transfer, ()).unwrap().wait().result.unwrap()
}
