//! The dependencies of shared libraries, within some folders.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::command::Tool;
use crate::workspace::Workspace;

/// Returns the `roots` and all their direct and indirect dependencies that are in `folders`. The
/// machine provides the other dependencies.
pub fn closure(
    workspace: &Workspace,
    folders: &[PathBuf],
    roots: Vec<PathBuf>,
) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut left: BTreeSet<PathBuf> = roots.into_iter().collect();
    while !left.is_empty() {
        let names = Tool::new(workspace, "readelf")
            .args(["--dynamic", "--wide"])
            .args(&left)
            .stdout()
            .context("cannot ask what a library needs; install binutils")?;
        found.append(&mut left);
        left = needed(&names)
            .filter_map(|name| find(folders, name))
            .filter(|library| !found.contains(library))
            .collect();
    }
    Ok(found)
}

fn find(folders: &[PathBuf], name: &str) -> Option<PathBuf> {
    folders.iter().map(|folder| folder.join(name)).find(|library| Path::is_file(library))
}

/// Returns the names of needed libraries from readelf's output: the text in brackets.
fn needed(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.lines().filter(|line| line.contains("(NEEDED)"));
    lines.filter_map(|line| line.split_once('[')?.1.strip_suffix(']'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read() {
        let text = "File: a.so\n\nDynamic section at offset 0x5d8:\n  Tag        Type\n \
                    0x0000000000000001 (NEEDED)             Shared library: [libucp-b.so.0.0.0]\n \
                    0x000000000000000e (SONAME)             Library soname: [a.so]\n \
                    0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n";
        assert_eq!(needed(text).collect::<Vec<_>>(), ["libucp-b.so.0.0.0", "libc.so.6"]);
    }

    #[test]
    fn only_libraries_in_the_folders_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("liba.so");
        std::fs::write(&library, "").unwrap();
        let folders = [PathBuf::from("/nowhere"), folder.path().to_owned()];
        assert_eq!(find(&folders, "liba.so"), Some(library));
        assert_eq!(find(&folders, "libc.so.6"), None);
    }
}
