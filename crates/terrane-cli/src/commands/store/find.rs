//! The stores of a directory.

use std::fs;
use std::path::{Path, PathBuf};

use terrane_store::tools::stat;

use crate::error::Failure;

/// The namespace from the arguments, or the only one in the directory.
pub(super) fn namespace(directory: &Path, given: Option<&str>) -> Result<String, Failure> {
    if let Some(name) = given {
        return Ok(name.to_owned());
    }
    let failed = |source| Failure::Read { path: directory.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_dir() && stat(directory, &name).is_ok() {
            names.push(name);
        }
    }
    names.sort();
    match names.as_slice() {
        [] => {
            let text =
                format!("{} has no store; pass the directory of a disk tier", directory.display());
            Err(Failure::Usage(text))
        }
        [name] => Ok(name.clone()),
        _ => {
            let text = format!(
                "{} has several stores; name one with --namespace: {}",
                directory.display(),
                names.join(", ")
            );
            Err(Failure::Usage(text))
        }
    }
}

/// All directories of the tier, in the order in which it was created.
pub(super) fn directories(first: &Path, others: &[PathBuf]) -> Vec<PathBuf> {
    [first.to_owned()].into_iter().chain(others.iter().cloned()).collect()
}
