//! The options.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Parser, ValueEnum, value_parser};
use terrane::core::Requirement;
use terrane::storage::{HugePageSize, HugePages};

use crate::models::BUILT_IN;

/// Moves KV blocks of a model between the tiers of this machine, and verifies every byte.
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
    /// Blocks to move; by default about 256 MiB of them, or what a quarter of the memory allows
    #[arg(long, value_parser = value_parser!(u32).range(1..))]
    pub blocks: Option<u32>,
    /// A directory on the disk to use; by default a temporary one, on a file system that is not
    /// memory if there is any
    #[arg(long, value_name = "DIRECTORY")]
    pub disk_path: Option<PathBuf>,
    /// Fails, with 3, where this cannot be used; without it, the job is done without
    #[arg(long, value_enum, value_name = "PART")]
    pub require: Option<Part>,
    /// Does the job without this, even where it could be used
    #[arg(long, value_enum, value_name = "PART", conflicts_with = "require")]
    pub without: Option<Part>,
    /// The pages that host memory is made of
    #[arg(long, value_enum, default_value_t = Pages::Transparent)]
    pub huge_pages: Pages,
    /// Threads that copy; by default one a processor, 8 at most
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// How often each hop is made; medians are shown
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Decides the bytes of the blocks and the block ids they go to
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// One JSON object a hop on standard output, and nothing else there
    #[arg(long)]
    pub json: bool,
    /// Also explains how each hop is made, before and after
    #[arg(short, long)]
    pub verbose: bool,
}

/// Hardware and services that only some machines have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// A GPU: the first tier is its memory then, and the second one pinned memory
    Gpu,
}

/// The pages that memory is made of.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Pages {
    /// Base pages only
    None,
    /// Huge pages that the kernel assembles by itself
    Transparent,
    /// Reserved huge pages of 2 MiB, transparent ones if there are none
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
