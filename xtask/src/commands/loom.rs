//! `loom`: explores the interleavings of the crates that have a `tests/loom.rs`.

use anyhow::Result;

use crate::command::Tool;
use crate::commands::nixl::with_nixl_for;
use crate::commands::test::run_counted;
use crate::tally::Tally;
use crate::workspace::{Workspace, crate_folder};

/// The maximum number of preemptions: switches from a thread that could continue.
///
/// The number of interleavings grows exponentially with this number. Almost all known bugs occur
/// with two preemptions (Musuvathi and Qadeer, "Iterative context bounding", PLDI 2007).
const MAX_PREEMPTIONS: &str = "2";

/// Model-checks every crate that has models.
pub fn run(workspace: &Workspace, tally: &mut Tally) -> Result<()> {
    let mut packages = workspace.members();
    packages.retain(|package| crate_folder(package).join("tests/loom.rs").is_file());
    if packages.is_empty() {
        tally.skip("loom", "no crate has a tests/loom.rs");
        return Ok(());
    }
    // `--cfg loom` replaces the atomics of every crate, so these builds have a separate target
    // folder.
    let cargo = with_nixl_for(workspace, Tool::cargo(workspace), &packages)?
        .env("RUSTFLAGS", "--cfg loom")
        .default_env("LOOM_MAX_PREEMPTIONS", MAX_PREEMPTIONS)
        .env("CARGO_TARGET_DIR", workspace.target().join("loom"))
        // Without optimisation a model overflows loom's small stacks. The lowest level and no debug
        // information, because the models run for a second and compile for a minute.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "false")
        .args(["test", "--release", "--no-fail-fast", "--test", "loom"])
        .args(packages.iter().flat_map(|package| ["--package", package.name.as_str()]))
        .args(["--", "--show-output"]);
    run_counted(workspace, cargo, "loom", tally)
}
