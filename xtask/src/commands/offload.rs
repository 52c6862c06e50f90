//! `offload`: the offload example in release mode, with every line of its output checked, and the
//! quickstart.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::Tool;
use crate::commands::simulated;
use crate::workspace::Workspace;

const CRATE: &str = "terrane";
const EXAMPLE: &str = "offload";

/// The example that new users copy.
const QUICKSTART: &str = "quickstart";

/// What newcomers with a device copy. It runs over the simulated driver.
const GPU: &str = "gpu";

/// Runs the examples: `quickstart` and `gpu` must succeed, and `offload` must verify every hop.
pub fn run(workspace: &Workspace) -> Result<()> {
    for example in [QUICKSTART, GPU] {
        let package = facade_example(workspace, example)?;
        let cargo = Tool::cargo(workspace).args([
            "run",
            "--quiet",
            "--release",
            "--package",
            package,
            "--example",
            example,
        ]);
        simulated::over_driver(workspace, cargo, simulated::DEVICES)?.run()?;
    }
    let example = facade_example(workspace, EXAMPLE)?;
    let output = Tool::cargo(workspace)
        .args(["run", "--quiet", "--release", "--package", example, "--example", EXAMPLE])
        .args(["--", "--json"])
        .stdout()?;
    print!("{output}");
    println!("{} hops verified", verified(&output, "hop")?.len());
    Ok(())
}

/// The crate of an example. Cargo finds the example, so that a moved file is no silent skip.
pub fn facade_example(workspace: &Workspace, example: &str) -> Result<&'static str> {
    let facade =
        workspace.member(CRATE).with_context(|| format!("the workspace has no crate `{CRATE}`"))?;
    if !facade.targets.iter().any(|target| target.is_example() && target.name == example) {
        bail!("the crate `{CRATE}` has no example `{example}`");
    }
    Ok(CRATE)
}

/// The lines of an example's output, `what` each; one that is not verified is an error.
pub fn verified(output: &str, what: &str) -> Result<Vec<Value>> {
    let mut lines = Vec::new();
    for line in output.lines() {
        let value: Value = serde_json::from_str(line)
            .with_context(|| format!("standard output holds a line that is no JSON: {line}"))?;
        if value["verified"] != Value::Bool(true) {
            bail!("a {what} was not verified: {line}");
        }
        lines.push(value);
    }
    if lines.is_empty() {
        bail!("the example printed no {what}");
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verified_hops_are_counted() {
        let output = "{\"hop\":\"a\",\"verified\":true}\n{\"hop\":\"b\",\"verified\":true}\n";
        assert_eq!(verified(output, "hop").unwrap().len(), 2);
    }

    #[test]
    fn anything_else_is_an_error() {
        for output in ["", "hello\n", "{\"hop\":\"a\"}\n", "{\"verified\":false}\n"] {
            assert!(verified(output, "hop").is_err(), "{output}");
        }
    }
}
