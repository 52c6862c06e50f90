//! Headings, tables and code blocks of Markdown files are complete and stand apart from text.
//!
//! Without a blank line, or without the head of a table, a page still renders, but wrongly.

use super::Problem;
use super::source::SourceFile;

/// Checks the blocks of a Markdown file.
pub fn check(file: &SourceFile) -> Vec<Problem> {
    if file.path.extension().is_none_or(|extension| extension != "md") {
        return Vec::new();
    }
    let mut problems = Vec::new();
    let mut problem = |line, message| problems.push(Problem::at(&file.path, line, message));
    let (mut previous, mut in_code) = (Kind::Blank, None);
    for (number, line) in file.numbered_lines() {
        let fence = line.starts_with("```");
        let kind = if fence { Kind::Fence } else { Kind::of(line) };
        if in_code.is_some() {
            if fence {
                in_code = None;
                previous = Kind::Fence;
            }
            continue;
        }
        match (previous, kind) {
            (Kind::Fence, Kind::Blank | Kind::Fence) => {}
            (Kind::Fence, _) => {
                problem(number, "a code block ends before this line; add a blank line")
            }
            (Kind::Heading, kind) if kind != Kind::Blank => {
                problem(number, "a heading stands right before this line; add a blank line");
            }
            (Kind::Text, Kind::Heading | Kind::Fence | Kind::Row) => {
                problem(number, "text stands right before this block; add a blank line");
            }
            (previous, Kind::Rule) if previous != Kind::Row => {
                problem(number, "a table has no row of column names");
            }
            _ => {}
        }
        if fence {
            in_code = Some(number);
        }
        previous = kind;
    }
    if let Some(line) = in_code {
        problem(line, "a code block does not end");
    }
    problems
}

/// The part of a Markdown block that a line is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Blank,
    Heading,
    /// The first or last line of a code block at the left margin.
    Fence,
    /// A row of a table.
    Row,
    /// The line between a table's column names and its rows.
    Rule,
    Text,
}

impl Kind {
    fn of(line: &str) -> Self {
        match line.as_bytes() {
            [] => Self::Blank,
            [b'#', ..] => Self::Heading,
            [b'|', cells @ ..] if cells.iter().all(|byte| b"|-: ".contains(byte)) => Self::Rule,
            [b'|', ..] => Self::Row,
            _ => Self::Text,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> usize {
        check(&SourceFile::new("a.md", text)).len()
    }

    #[test]
    fn complete_blocks_pass() {
        let text = "# A\n\nText.\n\n```text\n# no heading\n|---|\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n";
        assert_eq!(found(text), 0);
        assert_eq!(check(&SourceFile::new("a.rs", "a\n# b\nc\n")).len(), 0);
    }

    #[test]
    fn incomplete_blocks_are_found() {
        for text in [
            "Text.\n# Heading\n",
            "# Heading\nText.\n",
            "Text.\n```text\n```\n",
            "```text\n```\nText.\n",
            "- An item.\n|---|---|\n| 1 | 2 |\n",
            "\n|---|---|\n",
            "Text.\n| a | b |\n|---|---|\n",
            "```text\nText.\n",
        ] {
            assert_eq!(found(text), 1, "{text}");
        }
    }
}
