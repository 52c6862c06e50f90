//! Every Rust file begins with its purpose.

use super::Problem;
use super::source::SourceFile;

/// Checks that the first line that is not blank begins a `//!` comment.
pub fn check(file: &SourceFile) -> Option<Problem> {
    let first = file.text.lines().find(|line| !line.trim().is_empty());
    let says_something =
        first.and_then(|line| line.strip_prefix("//!")).is_some_and(|rest| !rest.trim().is_empty());
    if says_something {
        return None;
    }
    Some(Problem::at(&file.path, 1, "does not open with `//!`; say in a line what the file is for"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_about_the_file_comes_first() {
        for text in ["//! A head.\n", "\n//! A head.\n#![allow(x)]\n"] {
            assert_eq!(check(&SourceFile::new("a.rs", text)), None, "{text}");
        }
    }

    #[test]
    fn anything_else_first_is_a_problem() {
        for text in ["", "//!\n", "#![allow(x)]\n//! Late.\n", "/// Not inner.\n", "// Plain.\n"] {
            assert!(check(&SourceFile::new("a.rs", text)).is_some(), "{text}");
        }
    }
}
