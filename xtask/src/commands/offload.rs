//! `offload`: runs the offload example and checks every line of its output. Also runs the examples
//! that new users copy.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::command::MOST_SECONDS;
use crate::commands::examples::example;
use crate::commands::simulated;
use crate::workspace::Workspace;

const EXAMPLE: &str = "offload";

/// The examples that new users copy. They run over the simulated driver.
const COPIED: [&str; 5] = ["quickstart", "gpu", "candle", "swap_blocks", "host_tier"];

/// Runs the examples. The copied examples must succeed, and `offload` must verify every hop.
pub fn run(workspace: &Workspace) -> Result<()> {
    for name in COPIED {
        let program = example(workspace, name, MOST_SECONDS)?;
        simulated::over_driver(workspace, program, simulated::DEVICES)?.run()?;
    }
    let output = example(workspace, EXAMPLE, MOST_SECONDS)?.arg("--json").stdout()?;
    print!("{output}");
    println!("{} hops verified", verified(&output, "hop")?.len());
    Ok(())
}

/// Returns the lines of an example's output, one for each `what`. A line without verification is an
/// error.
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
