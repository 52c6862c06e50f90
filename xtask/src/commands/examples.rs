//! The examples that the gate runs. They are built as `test` builds them: with the same selection
//! of crates and features, cargo compiles nothing again. An optimised build would take a tenth of
//! the gate's time and checks no more.

use anyhow::{Context, Result, bail};

use crate::command::Tool;
use crate::commands::nixl::with_nixl;
use crate::workspace::Workspace;

const FACADE: &str = "terrane";
const INTEROP: &str = "terrane-interop-proof";
const POOL: &str = "terrane-pool";

/// Each example with its crate.
const EXAMPLES: [(&str, &str); 10] = [
    (FACADE, "quickstart"),
    (FACADE, "gpu"),
    (FACADE, "offload"),
    (FACADE, "two_processes"),
    (FACADE, "remote"),
    (FACADE, "foreign"),
    (INTEROP, "candle"),
    (INTEROP, "swap_blocks"),
    (INTEROP, "host_tier"),
    (POOL, "soak"),
];

/// Builds all examples, and returns the command that runs `example` in an environment with NIXL,
/// for at most so many seconds.
pub fn example(workspace: &Workspace, example: &str, most_seconds: u64) -> Result<Tool> {
    // Checks that the manifests have these examples, so that a moved file is an error.
    for (package, example) in EXAMPLES {
        let member = workspace
            .member(package)
            .with_context(|| format!("the workspace has no crate `{package}`"))?;
        if !member.targets.iter().any(|target| target.is_example() && target.name == example) {
            bail!("the crate `{package}` has no example `{example}`");
        }
    }
    with_nixl(workspace, Tool::cargo(workspace))?
        .args(["build", "--quiet", "--workspace", "--all-features"])
        .args(EXAMPLES.iter().flat_map(|(_, example)| ["--example", example]))
        .run()?;
    let program = workspace.target().join("debug/examples").join(example);
    with_nixl(workspace, Tool::new(workspace, program).within(most_seconds))
}
