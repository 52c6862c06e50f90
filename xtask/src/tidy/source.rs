//! The project's text files, read once.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ignore::WalkBuilder;
use proc_macro2::TokenStream;

/// A text file of the project.
pub struct SourceFile {
    pub path: PathBuf,
    pub text: String,
    tokens: Option<TokenStream>,
}

impl SourceFile {
    /// Stores the text and, for Rust files, its tokens.
    pub fn new(path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        let (path, text) = (path.into(), text.into());
        let tokens = if is_rust(&path) { text.parse().ok() } else { None };
        Self { path, text, tokens }
    }

    /// Whether this is a Rust source file.
    pub fn is_rust(&self) -> bool {
        is_rust(&self.path)
    }

    /// Whether this is CUDA C.
    pub fn is_kernel(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "cu")
    }

    /// Returns the tokens of a Rust file. `None` for other files and for invalid Rust.
    pub fn tokens(&self) -> Option<&TokenStream> {
        self.tokens.as_ref()
    }

    /// Returns the lines with their numbers, counted from 1.
    pub fn numbered_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().map(|(index, line)| (index + 1, line))
    }
}

/// Reads every text file under `folder`, except files that git ignores and files that cargo builds.
pub fn load(folder: &Path) -> Result<Vec<SourceFile>> {
    // Hidden files count (`.ci/run`, `.cargo/config.toml`). The project's own ignore rules apply,
    // also without git. Ignore rules of the machine and of parent folders do not.
    let walk = WalkBuilder::new(folder)
        .hidden(false)
        .require_git(false)
        .git_global(false)
        .git_exclude(false)
        .parents(false)
        .filter_entry(|entry| entry.file_name() != ".git" && entry.file_name() != "target")
        .sort_by_file_path(Path::cmp)
        .build();
    let mut files = Vec::new();
    for entry in walk {
        let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
        if !entry.file_type().is_some_and(|kind| kind.is_file()) || !is_text(entry.path()) {
            continue;
        }
        let text = fs::read_to_string(entry.path())
            .with_context(|| format!("cannot read {} as UTF-8", entry.path().display()))?;
        files.push(SourceFile::new(entry.path(), text));
    }
    Ok(files)
}

fn is_rust(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
}

/// Whether it is a text file of the project, by its extension. Scripts have none.
fn is_text(path: &Path) -> bool {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some(extension) => {
            matches!(extension, "rs" | "cu" | "md" | "toml" | "sh" | "py" | "yml" | "yaml")
        }
        None => path.parent().and_then(Path::file_name).is_some_and(|name| name == ".ci"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_and_built_files_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write(".gitignore", "scratch\n");
        write(".ci/run", "#!/bin/sh\n");
        write("src/lib.rs", "//! Here.\n");
        write("scratch/lib.rs", "not ours");
        write("target/debug/out.rs", "not ours");
        write("data.bin", "no text");
        let found = load(folder.path()).unwrap();
        let names: Vec<_> =
            found.iter().map(|file| file.path.strip_prefix(folder.path()).unwrap()).collect();
        assert_eq!(names, [Path::new(".ci/run"), Path::new("src/lib.rs")]);
    }
}
