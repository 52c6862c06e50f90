//! Every kernel's source has a PTX file that was compiled from its current text.

use std::fs;

use super::Problem;
use super::source::SourceFile;
use crate::kernels::check_stamp;

/// Checks a `.cu` file against the `.ptx` file of the same name in its folder.
pub fn check(file: &SourceFile) -> Option<Problem> {
    if !file.is_kernel() {
        return None;
    }
    let message = match fs::read_to_string(file.path.with_extension("ptx")) {
        Ok(ptx) => check_stamp(&file.text, &ptx).err()?.to_owned(),
        Err(error) => {
            format!("its PTX cannot be read ({error}); run `cargo xtask kernels build`")
        }
    };
    Some(Problem::of(&file.path, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::stamped;

    #[test]
    fn a_source_without_its_current_ptx_is_a_problem() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.cu");
        let of = |text: &str| check(&SourceFile::new(&path, text)).map(|problem| problem.message);
        assert!(of("source").unwrap().contains("cannot be read"));
        let ptx = stamped("a.cu", "source", "compiler 1", "ret;");
        fs::write(path.with_extension("ptx"), ptx).unwrap();
        assert_eq!(of("source"), None);
        assert!(of("changed").unwrap().contains("was changed"));
    }

    #[test]
    fn other_files_have_no_problem() {
        assert_eq!(check(&SourceFile::new("a.rs", "//! Rust.\n")), None);
    }
}
