//! The command-line options.

use clap::{Parser, ValueEnum, value_parser};

use crate::models::BUILT_IN;

/// Moves KV blocks of a model from one process to another through NIXL, and verifies every byte
///
/// Exits with 0 if all bytes are right, 1 if not, 2 if the options are not valid, and 3 if the
/// machine lacks a required resource.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
pub struct Options {
    /// A built-in model, or the path of a model's `config.json`
    #[arg(long, value_name = "NAME|PATH", default_value = "llama-3.1-8b", help = model_help())]
    pub model: String,
    /// Tensor-parallel ranks; the blocks of one rank are moved
    #[arg(long, value_name = "RANKS", default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    pub tensor_parallel: u32,
    /// Tokens a block
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = value_parser!(u32).range(1..))]
    pub page_size: u32,
    /// Blocks to move; by default about 128 MiB of them
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub blocks: Option<u32>,
    /// Layers to move, from the first one; by default all
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub layers: Option<u32>,
    /// The direction: prefill writes to decode, or decode reads from prefill
    #[arg(long, value_enum, default_value_t = Mode::Write)]
    pub mode: Mode,
    /// The kind of memory of the blocks in both processes
    #[arg(long, value_enum, default_value_t = MemoryTier::System)]
    pub tier: MemoryTier,
    /// Repetitions of the transfer; the output has the medians
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// The seed of the blocks' bytes and of the block ids
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Prints one JSON object for each transfer to standard output, and nothing else
    #[arg(long)]
    pub json: bool,
    /// The role of this process: prefill starts decode
    #[arg(long, value_enum, default_value_t = Role::Prefill, hide = true)]
    pub role: Role,
}

/// The process that executes the transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// Prefill writes the blocks into decode's memory
    Write,
    /// Decode reads the blocks from prefill's memory
    Read,
}

/// The kind of memory of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MemoryTier {
    /// Memory of the first GPU
    Device,
    /// Host memory that the first GPU can access
    Pinned,
    /// Host memory
    System,
}

/// The two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// The process that has computed the blocks
    Prefill,
    /// The process that uses the blocks
    Decode,
}

fn model_help() -> String {
    let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    format!("The path of a model's `config.json`, or one of {}", names.join(", "))
}
