//! The command-line options.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Parser, ValueEnum, value_parser};
use terrane::core::Requirement;
use terrane::storage::{HugePageSize, HugePages};

use crate::models::BUILT_IN;

/// Moves KV blocks of a model between the tiers of this machine, and verifies every byte
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
    /// Blocks to move; by default about 256 MiB of them, or fewer if a quarter of the memory is
    /// less
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub blocks: Option<u32>,
    /// A directory for the disk tier; by default a temporary directory, if possible on a file
    /// system that is not in memory
    #[arg(long, value_name = "DIRECTORY")]
    pub disk_path: Option<PathBuf>,
    /// Exits with 3 if this part is not available; without the option, the example runs without the
    /// part
    #[arg(long, value_enum, value_name = "PART")]
    pub require: Option<Part>,
    /// Does not use this part, even if it is available
    #[arg(long, value_enum, value_name = "PART", conflicts_with = "require")]
    pub without: Option<Part>,
    /// The page size of host memory
    #[arg(long, value_enum, default_value_t = Pages::Transparent)]
    pub huge_pages: Pages,
    /// Copy threads; by default one for each processor, at most 8
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Repetitions of each hop; the output has the medians
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// The seed of the blocks' bytes and of the block ids
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Prints one JSON object for each hop to standard output, and nothing else
    #[arg(long)]
    pub json: bool,
    /// Also explains each hop before the copy and after it
    #[arg(short, long)]
    pub verbose: bool,
}

/// Hardware that only some machines have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// A GPU: the compute tier is then its memory, and the host tier is pinned memory
    Gpu,
}

/// The pages of host memory.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Pages {
    /// Base pages only
    None,
    /// Huge pages that the kernel assembles
    Transparent,
    /// Reserved huge pages of 2 MiB, or transparent huge pages if none are reserved
    Explicit,
}

impl From<Pages> for HugePages {
    fn from(pages: Pages) -> Self {
        match pages {
            Pages::None => Self::None,
            Pages::Transparent => Self::Transparent(Requirement::Preferred),
            Pages::Explicit => Self::Explicit(HugePageSize::Mib2, Requirement::Preferred),
        }
    }
}

fn model_help() -> String {
    let names: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    format!("The path of a model's `config.json`, or one of {}", names.join(", "))
}
