//! Every command that CI, a GPU machine or a person needs: `cargo xtask help` lists them.

#![forbid(unsafe_code)]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command line tool prints; the lint is for the library crates"
)]

mod command;
mod commands;
mod kernels;
mod pypi;
mod site;
mod tally;
mod test_log;
mod tidy;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::tally::Tally;
use crate::workspace::Workspace;

/// Builds, checks, tests and measures Terrane.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Runs the whole gate and stops at the first step that fails
    ///
    /// Each step prints its name and how long it took; a failed one says which command runs it
    /// again. The last line is `N passed, N failed, N skipped`, the sum over all test runners;
    /// every skip is named with its reason above it.
    Ci(commands::ci::Arguments),
    /// Runs all tests of the workspace, doctests included, and adds them up
    ///
    /// The terminal shows one line per runner, and whole what failed; the full log is
    /// `target/xtask/test.log`. The last line is `N passed, N failed, N skipped`. A test that
    /// cannot run prints `skipped: NAME: REASON` and is counted as skipped, not as passed.
    /// Test binaries called `gpu` run twice more, over the simulated CUDA driver: in an order that
    /// is drawn from a seed (TERRANE_SIMULATED_SEED changes it), and with work as late as can be.
    Test(commands::test::Arguments),
    /// Checks what the compiler does not: crate arrows, file heads, unsafe proofs, leftovers
    ///
    /// Prints one line per finding and fails if there is any. It is also an ordinary test of the
    /// `xtask` crate. What it checks: crates depend only on lower levels, on the external crates
    /// that they own, and have at most three features; every file opens with `//!`, is no longer
    /// than the limit and has a proof at every `unsafe`; no `todo!`, `dbg!`, unexplained
    /// `#[ignore]`, `cfg(test)` outside test modules or `ignore`d example; every crate has its
    /// README, CHANGELOG and licences and inherits the workspace's lints; the project's pages speak
    /// of the project alone; every kernel's PTX was made of its source as it is; published crates have
    /// the metadata of a package; files import each other in no larger cycles than are known.
    Tidy,
    /// Formats the workspace, or with --check only says what is not formatted
    Fmt(commands::lint::FmtArguments),
    /// Runs clippy on all targets, with default and with all features, warnings denied
    Lint,
    /// Builds each library crate alone: without features, with its default ones, with all
    Features,
    /// Checks that Terrane builds beside crates that use cudarc in other ways
    ///
    /// Crates that name what candle-core names of cudarc, or an explicit version of CUDA, are
    /// generated under `target/compose`, and checked with the facade beside them. Needs no CUDA.
    Compose,
    /// Builds the documentation of the workspace, warnings denied
    ///
    /// With all features; and each crate whose `[package.metadata.docs.rs]` names fewer also as docs.rs
    /// will build it.
    Doc(commands::doc::Arguments),
    /// Packages each published crate, and builds it from the package alone
    ///
    /// Finds files that `include` leaves out, and dependencies without a version. Publishes nothing,
    /// and uses what cargo has downloaded already.
    Package,
    /// Runs the benchmark suites in release mode, each beside its baseline from the same run
    ///
    /// Without a suite it runs them all. With --json, standard output holds one JSON object a
    /// line and nothing else: suite, case, value, unit, baseline, baseline_name, ratio (better is
    /// larger), target (the least ratio) and ok. Fails if a suite fails to run and, with --check,
    /// if a target is missed.
    Bench(commands::bench::Arguments),
    /// Measures the copy paths of this machine's GPU, prints them, and saves them to a file
    ///
    /// Without a GPU it says what is missing and exits with 3. `--output FILE` says where to; the
    /// program's own `--help` lists the rest.
    Calibrate(commands::calibrate::Arguments),
    /// What needs a GPU, as a folder that runs on a machine without Rust
    Gpu(commands::gpu::Arguments),
    /// Compiles the CUDA kernels to the PTX that is committed, or checks that it fits its source
    #[command(subcommand)]
    Kernels(commands::kernels::Action),
    /// Fetches the NIXL that Terrane is tested with, and libclang, to `target/nixl`
    ///
    /// Both come from their wheels on PyPI (98 MB, checked by their hashes), for which `python3`
    /// with pip is needed, whatever its version; the bindings also need g++. What is there already
    /// is not fetched again. All other commands do it by themselves where they need it, and none
    /// does if TERRANE_NIXL is `system`. See docs/nixl.md.
    ///
    /// With `--with-verbs` it runs the tests of NIXL beside RDMA libraries that are not installed. With
    /// `--bindings` it checks `terrane-nixl` with the lowest and the highest supported `nixl-sys`, which
    /// takes some minutes and is no step of the gate.
    Nixl(commands::nixl::Arguments),
    /// Checks licences, bans and sources of all dependencies with cargo-deny
    ///
    /// Uses the `cargo-deny` on the PATH if it is recent enough, else installs a pinned version
    /// under `target/tools`. Advisories are not checked: see docs/decisions/0001-tooling.md.
    Deny,
    /// Runs the tests of crates with unsafe code under AddressSanitizer (needs a nightly toolchain)
    ///
    /// Without a nightly toolchain the step is reported as skipped. Compile-fail tests (their
    /// names contain `compile_fail`) are left out: they test the compiler's messages.
    Asan,
    /// Hands tensors and arrays both ways between Terrane and libraries from PyPI
    ///
    /// Builds `terrane-interop-proof`, installs what its `python/requirements.txt` pins under
    /// `target/interop` (needs `python3` with pip, and once the network), and runs its Python tests.
    Interop(commands::interop::Arguments),
    /// Model-checks the crates that have a `tests/loom.rs`, with a bounded number of preemptions
    Loom,
    /// Runs tests of core, layout, pool and the host path of transfers under Miri
    ///
    /// Miri detects undefined behaviour. Where it is not installed, the step is skipped by name:
    /// `rustup component add miri rust-src --toolchain nightly` installs it.
    Miri,
    /// Runs the offload example in release mode and checks that every hop is verified
    Offload,
    /// Runs the examples of two processes, and checks that all arrives and is verified
    ///
    /// `two_processes`, `remote` both ways, and `foreign` with an agent of NIXL in Python. NIXL is
    /// downloaded if it is missing.
    Remote,
    /// Runs pools and stacks of adaptors under random load, and checks that every byte came back
    ///
    /// Random sizes, threads, streams, trims and faults, in release mode; the accounts have to be
    /// exact afterwards. The gate runs it for 5 s.
    Soak(commands::soak::Arguments),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli.task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: &Task) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::load()?;
    match task {
        Task::Ci(arguments) => return commands::ci::run(&workspace, arguments),
        Task::Bench(arguments) => return commands::bench::run(&workspace, arguments),
        Task::Calibrate(arguments) => return commands::calibrate::run(&workspace, arguments),
        Task::Gpu(arguments) => return commands::gpu::run(&workspace, arguments),
        Task::Test(arguments) => {
            return summed(|tally| commands::test::run(&workspace, arguments, tally));
        }
        Task::Interop(arguments) => {
            return summed(|tally| commands::interop::run(&workspace, arguments, tally));
        }
        Task::Asan => return summed(|tally| commands::asan::run(&workspace, tally)),
        Task::Loom => return summed(|tally| commands::loom::run(&workspace, tally)),
        Task::Miri => return summed(|tally| commands::miri::run(&workspace, tally)),
        Task::Tidy => tidy::run(&workspace)?,
        Task::Fmt(arguments) => commands::lint::fmt(&workspace, arguments)?,
        Task::Lint => commands::lint::clippy(&workspace)?,
        Task::Features => commands::features::run(&workspace)?,
        Task::Compose => commands::compose::run(&workspace)?,
        Task::Doc(arguments) => commands::doc::run(&workspace, arguments)?,
        Task::Package => commands::package::run(&workspace)?,
        Task::Kernels(action) => commands::kernels::run(&workspace, action)?,
        Task::Nixl(arguments) => match &arguments.with_verbs {
            Some(packages) => {
                return summed(|tally| commands::nixl::verbs::test(&workspace, packages, tally));
            }
            None if arguments.bindings => commands::nixl::bindings::check(&workspace)?,
            None => commands::nixl::run(&workspace, arguments)?,
        },
        Task::Deny => commands::deny::run(&workspace)?,
        Task::Offload => commands::offload::run(&workspace)?,
        Task::Remote => commands::remote::run(&workspace)?,
        Task::Soak(arguments) => commands::soak::run(&workspace, arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs something that counts tests and ends with the line that sums them up.
fn summed(body: impl FnOnce(&mut Tally) -> anyhow::Result<()>) -> anyhow::Result<ExitCode> {
    let mut tally = Tally::default();
    let result = body(&mut tally);
    if let Err(error) = &result {
        eprintln!("error: {error:#}");
        tally.note_failure();
    }
    print!("{}", tally.summary());
    Ok(if result.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
