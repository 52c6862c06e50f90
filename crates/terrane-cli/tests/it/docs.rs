//! Runs the commands in the documentation one by one, as a new user does.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::PROGRAM;

/// The commands after `$ ` in the code blocks of a page.
fn commands(page: &str) -> Vec<String> {
    let (mut commands, mut is_block) = (Vec::new(), false);
    for line in page.lines() {
        if line.starts_with("```") {
            is_block = line == "```console";
        } else if let Some(command) = line.strip_prefix("$ ").filter(|_| is_block) {
            commands.push(command.to_owned());
        }
    }
    commands
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the commands use other programs too")]
fn every_command_of_the_documentation_works() {
    let folder = tempfile::tempdir().unwrap();
    let bin = Path::new(PROGRAM).parent().unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    // The page uses the directory of a store, and a file of its metrics.
    let metrics = crate::top::metrics(&folder.path().join("cache"));
    fs::write(folder.path().join("metrics.txt"), metrics).unwrap();
    let mut count = 0;
    for page in [root.join("README.md"), root.join("../../docs/cli.md")] {
        for command in commands(&fs::read_to_string(&page).unwrap()) {
            count += 1;
            let output = Command::new("sh")
                .args(["-c", &command])
                .env("PATH", &path)
                .current_dir(folder.path())
                .output()
                .unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{page:?}: {command}: {error}");
        }
    }
    assert!(count >= 12, "{count} commands");
}
