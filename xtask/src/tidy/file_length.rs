//! A file that is too long has several subjects.

use super::Problem;
use super::source::SourceFile;

/// The maximum number of lines of a Rust file. Most have 100 to 450.
pub const MOST_LINES: usize = 800;

/// Counts the lines.
pub fn check(file: &SourceFile) -> Option<Problem> {
    let lines = file.text.lines().count();
    (lines > MOST_LINES).then(|| {
        let message = format!("has {lines} lines, the limit is {MOST_LINES}; split it by subject");
        Problem::of(&file.path, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_itself_is_allowed() {
        assert_eq!(check(&SourceFile::new("a.rs", "\n".repeat(MOST_LINES))), None);
    }

    #[test]
    fn one_more_line_is_a_problem() {
        let problem = check(&SourceFile::new("a.rs", "\n".repeat(MOST_LINES + 1))).unwrap();
        assert!(problem.message.contains("801 lines"), "{problem}");
    }
}
