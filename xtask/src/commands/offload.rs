//! `offload`: the main job's example in release mode, its output checked line by line.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::Tool;
use crate::workspace::Workspace;

const CRATE: &str = "terrane";
const EXAMPLE: &str = "offload";

/// Runs the example with `--json`: it must succeed, and every hop must be verified.
pub fn run(workspace: &Workspace) -> Result<()> {
    let facade =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    // Cargo knows where the example is; a path here would turn into a silent skip when it moves.
    if !facade.targets.iter().any(|target| target.is_example() && target.name == EXAMPLE) {
        bail!("the crate `{CRATE}` has no example `{EXAMPLE}`");
    }
    let output = Tool::cargo(workspace)
        .args(["run", "--quiet", "--release", "--package", CRATE, "--example", EXAMPLE])
        .args(["--", "--json"])
        .stdout()?;
    print!("{output}");
    let hops = verified_hops(&output)?;
    println!("{hops} hops verified");
    Ok(())
}

/// Counts the hops; a line that is not a verified hop is an error.
fn verified_hops(output: &str) -> Result<usize> {
    for line in output.lines() {
        let hop: Value = serde_json::from_str(line)
            .with_context(|| format!("standard output holds a line that is no JSON: {line}"))?;
        if hop["verified"] != Value::Bool(true) {
            bail!("a hop was not verified: {line}");
        }
    }
    match output.lines().count() {
        0 => bail!("the example printed no hop"),
        hops => Ok(hops),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verified_hops_are_counted() {
        let output = "{\"hop\":\"a\",\"verified\":true}\n{\"hop\":\"b\",\"verified\":true}\n";
        assert_eq!(verified_hops(output).unwrap(), 2);
    }

    #[test]
    fn anything_else_is_an_error() {
        for output in ["", "hello\n", "{\"hop\":\"a\"}\n", "{\"verified\":false}\n"] {
            assert!(verified_hops(output).is_err(), "{output}");
        }
    }
}
