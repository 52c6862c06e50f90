//! The commands of CI, of GPU machines and of developers. `cargo xtask help` lists them.

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
    /// After the first four steps, two run at a time. Each step prints its name and its time. A
    /// failed step prints the command that repeats it. The last line is
    /// `N passed, N failed, N skipped`, the sum over all test runners. The lines above it name
    /// every skipped test with its reason.
    Ci(commands::ci::Arguments),
    /// Runs all tests of the workspace, doctests included, and counts them
    ///
    /// The terminal shows one line per runner and the full output of failed tests. The full log is
    /// `target/xtask/test.log`. The last line is `N passed, N failed, N skipped`. A test that
    /// cannot run prints `skipped: NAME: REASON` and counts as skipped.
    /// Test binaries named `gpu` also run twice over the simulated CUDA driver: once with work in a
    /// random order (TERRANE_SIMULATED_SEED sets the seed), and once with all work as late as
    /// possible.
    Test(commands::test::Arguments),
    /// Runs only the tests over the simulated CUDA driver, twice, as `test` does at its end
    Simulated,
    /// Checks the rules that the compiler does not check: crate levels, file heads, unsafe proofs
    ///
    /// Prints one line per finding and fails if there is any. A test of the `xtask` crate runs the
    /// same checks:
    ///
    /// - Crates depend only on lower levels, and on no external crate that another crate owns. They
    ///   have at most three features. The facade without features needs at most 25 packages.
    /// - Every Rust file begins with `//!`, has at most 800 lines and a `// SAFETY:` comment for
    ///   every `unsafe`.
    /// - There is no `todo!`, `dbg!`, `#[ignore]` without a reason, `cfg(test)` outside test
    ///   modules or `ignore`d example.
    /// - Every crate has its README, CHANGELOG and licences, and inherits the workspace's lints.
    ///   Published crates have the metadata of a package.
    /// - No page names an issue by its number alone, or a path of one machine.
    /// - Headings, tables and code blocks of Markdown files are complete.
    /// - The PTX of every kernel matches its source.
    /// - No import cycle has more than three files.
    Tidy,
    /// Formats the workspace, or with --check only lists the files that are not formatted
    Fmt(commands::lint::FmtArguments),
    /// Lints Python files with ruff, and Rust with clippy, with default and with all features
    Lint,
    /// Lints each library crate alone: without features, with the default ones, with each, with all
    Features,
    /// Checks that Terrane builds with crates that use cudarc in other ways
    ///
    /// Generates crates under `target/compose` that use the same features of cudarc as candle-core,
    /// or an explicit version of CUDA. Checks them together with the facade. Needs no CUDA.
    Compose,
    /// Builds the documentation of the workspace, warnings denied
    ///
    /// Builds with all features. A crate whose `[package.metadata.docs.rs]` names fewer features is
    /// also built as docs.rs builds it.
    Doc(commands::doc::Arguments),
    /// Packages each published crate, and builds it from the package alone
    ///
    /// Finds files that `include` omits, and dependencies without a version. Publishes nothing, and
    /// needs no network.
    Package,
    /// Runs the benchmark suites in release mode, each with its baseline from the same run
    ///
    /// Without a suite it runs all of them. With --json, standard output has one JSON object per
    /// line and nothing else. The fields are suite, case, value, unit, baseline, baseline_name,
    /// ratio (larger is better), target (the minimum ratio), no_target_because and ok. Fails if a
    /// suite cannot run and, with --check, if a target is missed.
    Bench(commands::bench::Arguments),
    /// Measures the copy paths of this machine's GPU, prints them, and saves them to a file
    ///
    /// Without a GPU, prints the missing requirement and exits with 3. `--output FILE` sets the
    /// file. `--help` after `--` lists the other options.
    Calibrate(commands::calibrate::Arguments),
    /// Builds or runs a folder of GPU tests and benchmarks, for machines without Rust
    Gpu(commands::gpu::Arguments),
    /// Compiles the CUDA kernels to the committed PTX, or checks that the PTX matches its source
    #[command(subcommand)]
    Kernels(commands::kernels::Action),
    /// Fetches the NIXL that Terrane is tested with, and libclang, to `target/nixl`
    ///
    /// Both come from wheels on PyPI (98 MB, checked by hash). This needs `python3` with pip, of
    /// any version. The bindings also need g++. Existing files are not fetched again. Other
    /// commands fetch NIXL when they need it. With TERRANE_NIXL=system, no command fetches it. See
    /// docs/nixl.md.
    ///
    /// `--with-verbs` runs the tests of NIXL with RDMA libraries from packages that are not
    /// installed. `--bindings` checks `terrane-nixl` with the lowest and the highest supported
    /// `nixl-sys`. This takes some minutes and is no step of the gate.
    Nixl(commands::nixl::Arguments),
    /// Checks licences, bans and sources of all dependencies with cargo-deny
    ///
    /// Uses `cargo-deny` from the PATH if it is recent enough. Otherwise it installs a pinned
    /// version under `target/tools`. It does not check advisories: see
    /// docs/decisions/0001-tooling.md.
    Deny,
    /// Runs the tests of crates with unsafe code under AddressSanitizer (needs a nightly toolchain)
    ///
    /// Without a nightly toolchain the step is skipped. Two groups of tests are omitted.
    /// `compile_fail` tests the messages of the stable compiler. `disk::crash` tests the store's
    /// catalog, which is safe code, for minutes.
    Asan,
    /// Exchanges tensors and arrays between Terrane and libraries from PyPI, in both directions
    ///
    /// Builds `terrane-interop-proof`, installs the versions in its `python/requirements.txt` under
    /// `target/interop`, and runs its Python tests. Needs `python3` with pip, and the network once.
    Interop(commands::interop::Arguments),
    /// Builds the Python package as a wheel, and tests it in fresh environments
    ///
    /// maturin is installed from PyPI to `target/python`. The tests run with `python3`, and with
    /// the newest Python of this machine if that is another version. `signatures` generates the
    /// tables of the engines' interfaces.
    Python(commands::python::Arguments),
    /// Model-checks the crates with a `tests/loom.rs`, with a bounded number of preemptions
    Loom,
    /// Runs tests of core, layout, pool and the host path of transfers under Miri
    ///
    /// Miri detects undefined behaviour. If it is not installed, the step is skipped.
    /// `rustup component add miri rust-src --toolchain nightly` installs it.
    Miri,
    /// Runs the examples that users copy, and `offload`, whose hops are all checked
    Offload,
    /// Runs the examples with two processes, and checks that every byte is verified
    ///
    /// Runs `two_processes`, `remote` in both directions, and `foreign` with a NIXL agent in
    /// Python. All use real NIXL, which is fetched if necessary.
    Remote,
    /// Runs pools and stacks of adaptors under random load, and checks that no byte is lost
    ///
    /// Sizes, threads, streams, trims and faults are random. Afterwards all counters must be exact.
    /// The gate runs it for 5 s.
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
        Task::Simulated => {
            return summed(|tally| commands::simulated::run(&workspace, &[], None, tally));
        }
        Task::Interop(arguments) => {
            return summed(|tally| commands::interop::run(&workspace, arguments, tally));
        }
        Task::Python(arguments) => {
            return summed(|tally| commands::python::run(&workspace, arguments, tally));
        }
        Task::Asan => return summed(|tally| commands::asan::run(&workspace, tally)),
        Task::Loom => return summed(|tally| commands::loom::run(&workspace, tally)),
        Task::Miri => return summed(|tally| commands::miri::run(&workspace, tally)),
        Task::Remote => return summed(|tally| commands::remote::run(&workspace, tally)),
        Task::Tidy => tidy::run(&workspace)?,
        Task::Fmt(arguments) => commands::lint::fmt(&workspace, arguments)?,
        Task::Lint => commands::lint::lint(&workspace)?,
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
        Task::Soak(arguments) => commands::soak::run(&workspace, arguments)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs `body`, which counts tests, and prints their sum as the last line.
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
