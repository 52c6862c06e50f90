//! `remote`: the example of two processes in release mode, its output checked line by line.

use anyhow::{Result, bail};

use crate::command::Tool;
use crate::commands::nixl::with_nixl;
use crate::commands::offload::{facade_example, verified};
use crate::workspace::Workspace;

const EXAMPLE: &str = "remote";

/// What each way moves, small: it is for the gate, and not for figures.
const SMALL: [&str; 7] = ["--json", "--blocks", "24", "--layers", "5", "--rounds", "3"];

/// Runs the example with `--json` both ways: it must succeed, with every byte verified.
pub fn run(workspace: &Workspace) -> Result<()> {
    let example = facade_example(workspace, EXAMPLE)?;
    for mode in ["write", "read"] {
        let output = with_nixl(workspace, Tool::cargo(workspace))?
            .args(["run", "--quiet", "--release", "--package", example, "--features", "nixl"])
            .args(["--example", EXAMPLE, "--", "--mode", mode])
            .args(SMALL)
            .stdout()?;
        print!("{output}");
        check(&output, mode)?;
    }
    println!("blocks went to another process and were fetched from one, verified");
    Ok(())
}

/// One line, verified, with neighbours joined and every round notified.
fn check(output: &str, mode: &str) -> Result<()> {
    let [line] = &verified(output, "transfer")?[..] else {
        bail!("a model with one group of layers makes one transfer: {output}");
    };
    let number = |field: &str| line[field].as_u64().unwrap_or(0);
    if line["mode"] != mode || number("notified") != 3 {
        bail!("this is not what was asked for: {line}");
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
