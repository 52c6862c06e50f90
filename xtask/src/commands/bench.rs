//! `bench`: the suites of `terrane-bench`, one binary each, and the suites of `terrane bench`.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use cargo_metadata::Target;

use crate::command::Tool;
use crate::commands::nixl::with_nixl;
use crate::workspace::Workspace;

const CRATE: &str = "terrane-bench";

/// The crate and program of the users' suites. The name of the program selects these suites.
const USERS: (&str, &str) = ("terrane-cli", "terrane");

/// A suite of `terrane bench` alone, so its name selects it.
const MOVERS: &str = "movers";

/// The options of `cargo xtask bench`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// The suite to run and its arguments (`--json`, `--check`, `--filter TEXT`; a suite's `--help`
    /// lists them). `terrane SUITE …` and `movers …` run the suites of the command `terrane bench`,
    /// which need a model and have no targets
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "SUITE AND ARGUMENTS")]
    arguments: Vec<String>,
}

/// Runs one suite or all of them, and returns the worst exit code.
pub fn run(workspace: &Workspace, arguments: &Arguments) -> Result<ExitCode> {
    if let Some(forwarded) = of_users(&arguments.arguments) {
        let (package, program) = USERS;
        let code = Tool::cargo(workspace)
            .args(["run", "--quiet", "--release", "--package", package, "--bin", program])
            .args(["--", "bench"])
            .args(forwarded)
            .exit_code()?;
        return Ok(ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX)));
    }
    let suites = suites(workspace)?;
    let known: Vec<String> = suites.iter().map(|suite| suite.name.clone()).collect();
    let (chosen, forwarded) = choose(&known, &arguments.arguments)?;
    let mut worst = 0;
    for suite in suites.into_iter().filter(|suite| chosen.contains(&suite.name)) {
        let code = with_features(workspace, suite)?
            .args(["run", "--quiet", "--release", "--package", CRATE, "--bin", &suite.name])
            .args(suite.required_features.iter().flat_map(|name| ["--features", name]))
            .arg("--")
            .args(forwarded)
            .exit_code()?;
        worst = worst.max(code);
    }
    Ok(ExitCode::from(u8::try_from(worst).unwrap_or(u8::MAX)))
}

/// Returns the arguments of `terrane bench`, if one of its suites is selected.
fn of_users(arguments: &[String]) -> Option<&[String]> {
    let (first, rest) = arguments.split_first()?;
    if first == USERS.1 { Some(rest) } else { (first == MOVERS).then_some(arguments) }
}

/// Returns cargo with the environment that a suite's features need. The only such feature is
/// `nixl`.
fn with_features(workspace: &Workspace, suite: &Target) -> Result<Tool> {
    let cargo = Tool::cargo(workspace);
    if suite.required_features.is_empty() { Ok(cargo) } else { with_nixl(workspace, cargo) }
}

/// Returns the binaries of the benchmark crate. Each of them is a suite.
fn suites(workspace: &Workspace) -> Result<Vec<&Target>> {
    let package =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    Ok(package.targets.iter().filter(|target| target.is_bin()).collect())
}

/// Separates the suite's name, if there is one, from the suite's arguments.
fn choose<'a>(
    known: &'a [String],
    arguments: &'a [String],
) -> Result<(&'a [String], &'a [String])> {
    if known.is_empty() {
        bail!("`{CRATE}` has no suite yet");
    }
    match arguments.split_first() {
        Some((name, forwarded)) if !name.starts_with('-') => {
            let Some(position) = known.iter().position(|suite| suite == name) else {
                bail!(
                    "there is no benchmark suite `{name}`; the suites are: {}, and those of \
                     `terrane bench`: terrane host, terrane disk DIR, terrane store DIR, terrane gpu, {MOVERS}",
                    known.join(", ")
                );
            };
            Ok((known.get(position..=position).unwrap_or_default(), forwarded))
        }
        _ => Ok((known, arguments)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(items: &[&str]) -> Vec<String> {
        items.iter().map(|&item| item.to_owned()).collect()
    }

    #[test]
    fn a_named_suite_takes_the_other_arguments() {
        let (known, given) = (strings(&["disk", "host"]), strings(&["host", "--json"]));
        let (suites, forwarded) = choose(&known, &given).unwrap();
        assert_eq!((suites, forwarded), (&strings(&["host"])[..], &strings(&["--json"])[..]));
    }

    #[test]
    fn suites_of_users_are_reached_by_the_name_of_the_command() {
        let forwarded = |items: &[&str]| of_users(&strings(items)).map(<[String]>::to_vec);
        let model = "llama-3.1-8b";
        assert_eq!(forwarded(&["terrane", "host", model]), Some(strings(&["host", model])));
        assert_eq!(forwarded(&["movers", model]), Some(strings(&["movers", model])));
        assert_eq!(forwarded(&["host", "--json"]), None);
        assert_eq!(forwarded(&[]), None);
    }

    #[test]
    fn without_a_name_all_suites_run() {
        let (known, given) = (strings(&["disk", "host"]), strings(&["--json"]));
        let (suites, forwarded) = choose(&known, &given).unwrap();
        assert_eq!((suites, forwarded), (&known[..], &given[..]));
    }

    #[test]
    fn an_unknown_suite_is_an_error_that_lists_the_known_ones() {
        let (known, given) = (strings(&["disk", "host"]), strings(&["hots"]));
        let error = choose(&known, &given).unwrap_err().to_string();
        assert!(error.contains("disk, host"), "{error}");
    }
}
