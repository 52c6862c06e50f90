//! The project's pages and comments depend on nothing outside the project.

use super::Problem;
use super::source::SourceFile;

/// Paths of one person's machine. Each is split in two, so that this file does not contain it.
const FOREIGN_PATHS: [[&str; 2]; 3] = [["..", "/shared"], ["/wo", "rk/"], ["/tmp", "/wt"]];

/// Finds numbers of issues without a link, and paths outside the project.
pub fn check(file: &SourceFile) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in file.numbered_lines() {
        if mentions_issue_number(line) {
            let message = "names an issue by its number; state its subject, or give the link";
            problems.push(Problem::at(&file.path, number, message));
        }
        for path in FOREIGN_PATHS.map(|halves| halves.concat()) {
            if mentions_path(line, &path) {
                let message = format!("names `{path}`, which only its author has");
                problems.push(Problem::at(&file.path, number, message));
            }
        }
    }
    problems
}

/// Finds `issue`, a number sign and a number. Without the sign it may be a verb: "issue 4
/// requests".
fn mentions_issue_number(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    line.match_indices("issue #").any(|(start, words)| {
        let rest = line.get(start + words.len()..).unwrap_or_default();
        rest.starts_with(|first: char| first.is_ascii_digit())
    })
}

/// Whether the path is at the beginning of a word. `a/b/` does not mention `/b/`.
fn mentions_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(start, _)| {
        let before = line.get(..start).and_then(|head| head.chars().next_back());
        before.is_none_or(|sign| !sign.is_alphanumeric() && !matches!(sign, '_' | '-' | '.'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> usize {
        check(&SourceFile::new("a.md", text)).len()
    }

    #[test]
    fn public_references_pass() {
        assert_eq!(found("See https://github.com/rust-lang/rust/issues/1234 for it.\n"), 0);
        assert_eq!(found("Two threads issue 3 reads each.\n"), 0);
        assert_eq!(found(&format!("Under frame{}x.\n", FOREIGN_PATHS[1].concat())), 0);
    }

    #[test]
    fn private_references_are_found() {
        assert_eq!(found(&format!("as in {} #12\n", "issue")), 1);
        assert_eq!(found(&format!("{} #3 asks for it\n", "Issue")), 1);
        for halves in FOREIGN_PATHS {
            assert_eq!(found(&format!("see `{}/x`\n", halves.concat())), 1, "{halves:?}");
        }
    }
}
