//! `test`: all tests of the workspace under `cargo test`, summed over all runners.

use std::fs::{self, File};
use std::io::{BufWriter, Write};

use anyhow::{Context, Result, bail};
use cargo_metadata::Package;

use crate::command::{MOST_SECONDS, Tool, limit};
use crate::commands::nixl::with_nixl_for;
use crate::commands::peers::with_python;
use crate::commands::simulated;
use crate::tally::Tally;
use crate::test_log::TestLog;
use crate::workspace::Workspace;

/// The options of `cargo xtask test`.
#[derive(Debug, Default, clap::Args)]
pub struct Arguments {
    /// Runs only this crate's tests and doctests (may be given several times)
    #[arg(short, long, value_name = "CRATE")]
    package: Vec<String>,
    /// Runs only tests whose name contains this text
    filter: Option<String>,
}

/// The seed of property tests, unless `PROPTEST_RNG_SEED` is set. The cases are the same every
/// time, so that a failure comes from the current change. `cargo test` uses new cases.
pub const PROPTEST_SEED: &str = "1";

/// Runs the tests with all features. The tests that need a device run again over a simulated one.
pub fn run(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    run_once(workspace, arguments, tally)?;
    simulated::run(workspace, &arguments.package, arguments.filter.as_ref(), tally)
}

/// Runs the tests with all features, on the devices of this machine.
pub fn run_once(workspace: &Workspace, arguments: &Arguments, tally: &mut Tally) -> Result<()> {
    let chosen = chosen(workspace, &arguments.package)?;
    if chosen.iter().any(|package| simulated::can_use(workspace, package)) {
        simulated::build(workspace)?;
    }
    let cargo = with_nixl_for(workspace, Tool::cargo(workspace), &chosen)?;
    let mut cargo = with_python(workspace, cargo, &chosen)?
        .env("RUSTDOCFLAGS", "-D warnings")
        .default_env("PROPTEST_RNG_SEED", PROPTEST_SEED)
        .args(["test", "--all-features", "--no-fail-fast"]);
    if arguments.package.is_empty() {
        cargo = cargo.arg("--workspace");
    }
    for package in &arguments.package {
        cargo = cargo.args(["--package", package]);
    }
    let cargo = cargo.arg("--").args(&arguments.filter).arg("--show-output");
    run_counted(workspace, cargo, "test", tally)
}

/// Returns the members with these names, or all members.
fn chosen<'a>(workspace: &'a Workspace, names: &[String]) -> Result<Vec<&'a Package>> {
    if names.is_empty() {
        return Ok(workspace.members());
    }
    let find = |name: &String| {
        workspace.member(name).with_context(|| format!("the workspace has no crate `{name}`"))
    };
    names.iter().map(find).collect()
}

/// Runs a `cargo test` command line and adds its results to `tally`. The command line must pass
/// `--show-output` to libtest, which otherwise hides the `skipped:` lines of tests that passed.
/// Each binary has a time limit. Another program needs [`Tool::within`].
///
/// The full log is written to `target/xtask/LOG.log`.
pub fn run_counted(workspace: &Workspace, cargo: Tool, log: &str, tally: &mut Tally) -> Result<()> {
    let runner = limit(MOST_SECONDS).join(" ");
    let cargo = cargo.env(&runner_variable(&host_triple(workspace)?), runner);
    run_under_own_runner(workspace, cargo, log, tally)
}

/// Does the same as [`run_counted`] for a `cargo` with its own runner, such as Miri. The binaries
/// have no time limit.
pub fn run_under_own_runner(
    workspace: &Workspace,
    cargo: Tool,
    log: &str,
    tally: &mut Tally,
) -> Result<()> {
    let folder = workspace.target().join("xtask");
    fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(format!("{log}.log"));
    let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut file = BufWriter::new(file);

    let line = cargo.to_string();
    let mut state = TestLog::default();
    let succeeded = cargo.each_line(|text| {
        writeln!(file, "{text}").with_context(|| format!("cannot write {}", path.display()))?;
        state.line(text).iter().for_each(|shown| println!("{shown}"));
        Ok(())
    })?;
    file.flush().with_context(|| format!("cannot write {}", path.display()))?;

    let (rest, counted) = state.finish(succeeded);
    rest.iter().for_each(|shown| println!("{shown}"));
    let failed = counted.failed;
    tally.add(counted);
    if !succeeded || failed > 0 {
        bail!("`{line}` failed: {failed} failures; the full log is {}", path.display());
    }
    Ok(())
}

/// Returns the target triple of this machine.
pub fn host_triple(workspace: &Workspace) -> Result<String> {
    Tool::new(workspace, "rustc")
        .args(["--print", "host-tuple"])
        .stdout()
        .map(|text| text.trim().to_owned())
        .context("cannot ask rustc for the host's target")
}

/// Returns the variable that names the runner of test binaries for cargo.
fn runner_variable(triple: &str) -> String {
    format!("CARGO_TARGET_{}_RUNNER", triple.to_uppercase().replace('-', "_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runner_is_set_for_the_host() {
        let name = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER";
        assert_eq!(runner_variable("x86_64-unknown-linux-gnu"), name);
    }
}
