//! `remote`: runs the examples with two processes, and checks each line of their output.

use anyhow::{Result, bail};

use crate::command::MOST_SECONDS;
use crate::commands::examples::example;
use crate::commands::offload::verified;
use crate::commands::peers;
use crate::tally::Tally;
use crate::workspace::Workspace;

const EXAMPLE: &str = "remote";

/// The example that users copy: one process exports blocks and the other one reads them.
const TWO_PROCESSES: &str = "two_processes";

/// The example with a Python program as the other process.
const FOREIGN: &str = "foreign";

/// The arguments. The amount is small, because the gate checks correctness and not speed.
const SMALL: [&str; 7] = ["--json", "--blocks", "24", "--layers", "5", "--rounds", "3"];

/// Runs the examples. `remote` runs with `--json` in both directions, and every byte must be
/// verified.
pub fn run(workspace: &Workspace, tally: &mut Tally) -> Result<()> {
    two_processes(workspace)?;
    for mode in ["write", "read"] {
        let output = example(workspace, EXAMPLE, MOST_SECONDS)?
            .args(["--mode", mode])
            .args(SMALL)
            .stdout()?;
        print!("{output}");
        check(&output, mode)?;
    }
    println!("blocks were written to another process and read from one, verified");
    foreign(workspace, tally)
}

/// Runs the short example. It fails if a byte differs.
fn two_processes(workspace: &Workspace) -> Result<()> {
    let output = example(workspace, TWO_PROCESSES, MOST_SECONDS)?.stdout()?;
    print!("{output}");
    if !output.contains(" bytes verified") {
        bail!("the example `{TWO_PROCESSES}` verified no bytes: {output}");
    }
    Ok(())
}

/// Runs the example with a NIXL agent in Python.
fn foreign(workspace: &Workspace, tally: &mut Tally) -> Result<()> {
    let Some(site) = peers::python(workspace)? else {
        tally.skip(FOREIGN, "no wheels are pinned for this version of Python");
        return Ok(());
    };
    let output = example(workspace, FOREIGN, MOST_SECONDS)?.env("PYTHONPATH", &site).stdout()?;
    print!("{output}");
    if !output.contains(" verified, notified by ") {
        bail!("the example `{FOREIGN}` did not report verified blocks: {output}");
    }
    Ok(())
}

/// Checks that the output has one verified line, with joined neighbours and a notification for
/// every round.
fn check(output: &str, mode: &str) -> Result<()> {
    let [line] = &verified(output, "transfer")?[..] else {
        bail!("a model with one group of layers makes one transfer: {output}");
    };
    let number = |field: &str| line[field].as_u64().unwrap_or(0);
    if line["mode"] != mode || number("notified") != 3 {
        bail!("the example reported another transfer than the requested one: {line}");
    }
    if number("descriptors") == 0 || number("descriptors") >= number("pieces") {
        bail!("no neighbours were joined: {line}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(mode: &str, descriptors: u32, verified: bool) -> String {
        format!(
            "{{\"mode\":{mode:?},\"pieces\":40,\"descriptors\":{descriptors},\"notified\":3,\
             \"verified\":{verified}}}\n"
        )
    }

    #[test]
    fn a_verified_transfer_passes() {
        check(&line("read", 8, true), "read").unwrap();
    }

    #[test]
    fn anything_else_does_not() {
        for output in [
            String::new(),
            String::from("hello\n"),
            line("write", 8, true),
            line("read", 40, true),
            line("read", 8, false),
            line("read", 8, true).repeat(2),
        ] {
            assert!(check(&output, "read").is_err(), "{output}");
        }
    }
}
