//! The options.

use clap::{Parser, ValueEnum, value_parser};

use crate::models::BUILT_IN;

/// Moves KV blocks of a model from one process to another through NIXL, and verifies every byte.
///
/// Exits with 0 if all bytes were where they belong, 1 if not, 2 if the options make no sense, and
/// 3 if the machine cannot do what was asked.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub struct Options {
    /// A model that is built in, or the path of a model's `config.json`
    #[arg(long, value_name = "NAME|PATH", default_value = "llama-3.1-8b", help = model_help())]
    pub model: String,
    /// Tensor-parallel ranks; the blocks of one of them are moved
    #[arg(long, value_name = "RANKS", default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    pub tensor_parallel: u32,
    /// Tokens a block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = value_parser!(u32).range(1..))]
    pub page_size: u32,
    /// Blocks to move; by default about 128 MiB of them
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub blocks: Option<u32>,
    /// Layers to move, from the first on; by default all
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub layers: Option<u32>,
    /// The direction: prefill writes to decode, or decode reads from prefill
    #[arg(long, value_enum, default_value_t = Mode::Write)]
    pub mode: Mode,
    /// The memory that both sides have their blocks in
    #[arg(long, value_enum, default_value_t = MemoryTier::System)]
    pub tier: MemoryTier,
    /// How often the blocks are moved; medians are shown
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Decides the bytes of the blocks and the block ids they go to
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// One JSON object a transfer on standard output, and nothing else there
    #[arg(long)]
    pub json: bool,
    /// Which of the two processes this is: the first starts the second
    #[arg(long, value_enum, default_value_t = Role::Prefill, hide = true)]
    pub role: Role,
}

/// The process that moves the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Prefill writes the blocks into decode's memory
    Write,
    /// Decode reads the blocks from prefill's memory
    Read,
}

/// The memory that blocks are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MemoryTier {
    /// Memory of the first GPU
    Device,
    /// Host memory that the first GPU reaches
    Pinned,
    /// Host memory
    System,
}

/// The two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Has computed the blocks
    Prefill,
    /// Goes on with them
    Decode,
}

fn model_help() -> String {
    let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    format!("The path of a model's `config.json`, or one of {}", names.join(", "))
}
