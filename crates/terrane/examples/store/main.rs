//! Conversations of several turns over a store of KV blocks, with the shape of Llama 3.1 8B. The
//! store has a tier in host memory and a tier on disk. Half-way the process is killed, and another
//! process continues with the blocks on disk. Every block that a get returns is verified byte for
//! byte.
//!
//! `cargo run --release --example store`; `-- --help` lists the options.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "an example prints what it finds")]

mod engine;
mod report;
mod turns;

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use terrane::core::ByteCount;
use terrane::store::disk::Namespace;
use terrane::store::{BlockGroup, DiskTier, Recovery, Store};

use engine::Engine;
use report::{Report, TurnReport};

/// Runs conversations over a store of KV blocks, with a kill and a restart half-way
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// The number of conversations
    #[arg(long, default_value_t = 6)]
    sessions: u32,
    /// The number of turns of each conversation
    #[arg(long, default_value_t = 6)]
    turns: u32,
    /// The number of blocks that each turn adds: 16 tokens, 2 MiB each
    #[arg(long, default_value_t = 6)]
    blocks: u32,
    /// The number of blocks of the system prompt, which all conversations share
    #[arg(long, default_value_t = 8)]
    shared: u32,
    /// The number of blocks of the tier in host memory
    #[arg(long, default_value_t = 64)]
    host_blocks: u32,
    /// The number of blocks of the disk tier
    #[arg(long, default_value_t = 160)]
    disk_blocks: u32,
    /// The directory of the disk tier; a temporary one by default
    #[arg(long)]
    directory: Option<PathBuf>,
    /// A file for metrics, which `terrane top` reads; it is written five times a second
    #[arg(long)]
    metrics: Option<PathBuf>,
    /// Prints one JSON object instead of tables
    #[arg(long)]
    json: bool,
    /// Internal: runs the first half of the turns, and prints a line after each
    #[arg(long, hide = true)]
    is_first_half: bool,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("store: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because: {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    if options.is_first_half {
        let directory = options.directory.as_deref().ok_or("the first half needs a directory")?;
        return first_half(options, directory);
    }
    // A folder next to the build's files, because a temporary directory is often in memory.
    let temporary = match &options.directory {
        Some(_) => None,
        None => {
            let executable = std::env::current_exe()?;
            let parent = executable.parent().ok_or("the program has no directory")?;
            Some(tempfile::Builder::new().prefix("terrane-store").tempdir_in(parent)?)
        }
    };
    let directory = match (&options.directory, &temporary) {
        (Some(directory), _) => directory.clone(),
        (None, Some(temporary)) => temporary.path().to_owned(),
        (None, None) => return Err("there is no directory".into()),
    };
    let first = kill_half_way(options, &directory)?;

    let engine = Engine::new(options.most_blocks())?;
    let (store, recovery) = open(options, &engine, &directory)?;
    let mut report = Report { first, recovery: Some(recovery), ..Report::default() };
    turns::run(options, (&store, &engine), options.half_of_turns()..options.all_turns(), |turn| {
        report.second.push(turn);
        Ok(())
    })?;
    let outcome = store.sync()?.wait();
    if let Some(failed) = outcome.results.iter().find(|result| !result.is_ok()) {
        return Err(format!("the sync ended with: {failed}").into());
    }
    report.print(options, &store.snapshot())?;
    drop(store);
    Ok(())
}

impl Options {
    /// The number of turns of all conversations.
    const fn all_turns(&self) -> u32 {
        self.sessions * self.turns
    }

    const fn half_of_turns(&self) -> u32 {
        self.all_turns() / 2
    }

    /// The number of blocks of the longest prompt.
    const fn most_blocks(&self) -> u32 {
        self.shared + self.turns * self.blocks
    }
}

fn open(
    options: &Options,
    engine: &Engine,
    directory: &Path,
) -> Result<(Store, Recovery), Box<dyn Error>> {
    let block = engine.block_bytes();
    let bytes = |blocks: u32| block.checked_mul("blocks", blocks.into());
    let namespace = Namespace::new("llama-3.1-8b", [("model", "llama-3.1-8b"), ("rank", "0")])?;
    let opened = Store::builder()
        .group(BlockGroup::of_layout("kv", engine.endpoint().layout()))
        .host(bytes(options.host_blocks)?)
        .disk(DiskTier::new(directory, bytes(options.disk_blocks)?))
        .namespace(namespace)
        .close_within(Duration::from_secs(30))
        .open()?;
    if let Some(file) = &options.metrics {
        opened.0.export_metrics(file, Duration::from_millis(200))?;
    }
    Ok(opened)
}

/// The process that will be killed.
fn first_half(options: &Options, directory: &Path) -> Result<(), Box<dyn Error>> {
    let engine = Engine::new(options.most_blocks())?;
    let (store, _) = open(options, &engine, directory)?;
    // This function never returns: after its half, it continues until the process is killed.
    turns::run(options, (&store, &engine), 0..options.all_turns(), |turn| {
        println!("{}", serde_json::to_string(&turn)?);
        Ok(())
    })
}

/// Runs the first half in another process, and kills it in the middle of its work.
fn kill_half_way(options: &Options, directory: &Path) -> Result<Vec<TurnReport>, Box<dyn Error>> {
    let mut child = Killed(
        Command::new(std::env::current_exe()?)
            .args(["--is-first-half", "--directory"])
            .arg(directory)
            .args(options.sizes())
            .args(options.metrics.iter().flat_map(|file| [Path::new("--metrics"), file]))
            .stdout(Stdio::piped())
            .spawn()?,
    );
    let out = child.0.stdout.take().ok_or("the first process has no output")?;
    let mut turns = Vec::new();
    for line in BufReader::new(out).lines() {
        turns.push(serde_json::from_str(&line?)?);
        if turns.len() >= usize::try_from(options.half_of_turns())? {
            return Ok(turns);
        }
    }
    Err("the first process ended before its half".into())
}

/// A process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Options {
    fn sizes(&self) -> Vec<String> {
        let sizes = [
            ("--sessions", self.sessions),
            ("--turns", self.turns),
            ("--blocks", self.blocks),
            ("--shared", self.shared),
            ("--host-blocks", self.host_blocks),
            ("--disk-blocks", self.disk_blocks),
        ];
        sizes.iter().flat_map(|(name, size)| [(*name).to_owned(), size.to_string()]).collect()
    }
}

/// The rate in gigabytes per second, or zero if no time has passed.
pub(crate) fn gigabytes(bytes: ByteCount, time: Duration) -> f64 {
    if time.is_zero() { 0.0 } else { bytes.get() as f64 / time.as_secs_f64() / 1e9 }
}
