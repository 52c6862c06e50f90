//! `tidy`: the rules of this workspace that no compiler checks, with one file for each rule.

mod compiled_kernels;
mod crate_arrows;
mod crate_files;
mod doc_examples;
mod facade_size;
mod file_head;
mod file_length;
mod import_cycles;
mod leftovers;
mod markdown;
mod ownership;
mod package_metadata;
mod self_contained;
mod source;
mod test_code;
mod tokens;
mod unsafe_code;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use cargo_metadata::Package;

use crate::workspace::{Workspace, crate_folder};
use source::SourceFile;

/// One violation of one rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    file: PathBuf,
    line: Option<usize>,
    message: String,
}

impl Problem {
    /// A problem at a line, counted from 1.
    fn at(file: &Path, line: usize, message: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: Some(line), message: message.into() }
    }

    /// A problem of the whole file.
    fn of(file: &Path, message: impl Into<String>) -> Self {
        Self { file: file.to_owned(), line: None, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(formatter, ":{line}")?;
        }
        write!(formatter, ": {}", self.message)
    }
}

/// Prints every problem. Fails if there is one.
pub fn run(workspace: &Workspace) -> Result<()> {
    let problems = check(workspace)?;
    for problem in &problems {
        println!("{problem}");
    }
    if !problems.is_empty() {
        bail!("tidy found {} problems", problems.len());
    }
    Ok(())
}

/// Whether a crate's own sources contain unsafe code.
pub fn has_unsafe_code(package: &Package) -> Result<bool> {
    let sources = source::load(&crate_folder(package).join("src"))?;
    Ok(sources.iter().any(unsafe_code::contains_unsafe))
}

/// The CUDA C files of the workspace.
pub fn kernel_sources(workspace: &Workspace) -> Result<Vec<PathBuf>> {
    let files = source::load(workspace.root())?;
    Ok(files.into_iter().filter(SourceFile::is_kernel).map(|file| file.path).collect())
}

/// Applies all rules to the workspace.
fn check(workspace: &Workspace) -> Result<Vec<Problem>> {
    let mut problems = Vec::from_iter(facade_size::check(workspace)?);
    for package in workspace.members() {
        problems.extend(crate_arrows::check(package, workspace));
        problems.extend(ownership::check(package));
        problems.extend(import_cycles::check(package)?);
        problems.extend(package_metadata::check(package)?);
        problems.extend(crate_files::check(workspace, package)?);
        problems.extend(unsafe_code::check_forbidden(package)?);
    }
    for file in source::load(workspace.root())? {
        problems.extend(self_contained::check(&file));
        problems.extend(doc_examples::check(&file));
        problems.extend(markdown::check(&file));
        problems.extend(compiled_kernels::check(&file));
        if file.is_rust() {
            problems.extend(check_rust(&file));
        }
    }
    for problem in &mut problems {
        if let Ok(relative) = problem.file.strip_prefix(workspace.root()) {
            problem.file = relative.to_owned();
        }
    }
    problems.sort();
    Ok(problems)
}

/// The rules for Rust files alone.
fn check_rust(file: &SourceFile) -> Vec<Problem> {
    let Some(tokens) = file.tokens() else {
        return vec![Problem::of(&file.path, "is not made of Rust tokens")];
    };
    let mut problems = Vec::new();
    problems.extend(file_head::check(file));
    problems.extend(file_length::check(file));
    problems.extend(unsafe_code::check(file, tokens));
    problems.extend(leftovers::check(file, tokens));
    problems.extend(test_code::check(file, tokens));
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_is_tidy() {
        let problems = check(&Workspace::load().unwrap()).unwrap();
        let lines: Vec<String> = problems.iter().map(Problem::to_string).collect();
        assert!(lines.is_empty(), "{}", lines.join("\n"));
    }
}
