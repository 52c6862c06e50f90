//! Examples in the documentation compile: no code block is marked `ignore`.

use super::Problem;
use super::source::SourceFile;

/// Checks the code fences in doc comments and in Markdown files.
pub fn check(file: &SourceFile) -> Vec<Problem> {
    let markdown = file.path.extension().is_some_and(|extension| extension == "md");
    if !markdown && !file.is_rust() {
        return Vec::new();
    }
    let ignored = file.numbered_lines().filter(|(_, line)| {
        let text = if markdown { Some(line.trim_start()) } else { doc_text(line) };
        text.is_some_and(is_ignored_fence)
    });
    ignored
        .map(|(line, _)| {
            let message = "a code block is marked `ignore`; make it compile (`no_run`, hidden \
                           lines), or mark it `text` if it is no Rust";
            Problem::at(&file.path, line, message)
        })
        .collect()
}

/// Returns the text of a line of a doc comment.
fn doc_text(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let text = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
    Some(text.trim_start())
}

fn is_ignored_fence(text: &str) -> bool {
    let Some(tags) = text.strip_prefix("```").or_else(|| text.strip_prefix("~~~")) else {
        return false;
    };
    // `ignore-x86_64` and similar tags count as well.
    tags.split([',', ' ', '`']).any(|tag| tag == "ignore" || tag.starts_with("ignore-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> usize {
        check(&SourceFile::new(path, text)).len()
    }

    #[test]
    fn compiled_blocks_pass() {
        assert_eq!(found("a.rs", "/// ```\n/// f();\n/// ```\n/// ```no_run\n/// ```\n"), 0);
        assert_eq!(found("README.md", "```rust\nf();\n```\n\nOne may ignore it.\n"), 0);
        assert_eq!(found("a.rs", "let text = \"```ignore\";\n"), 0);
    }

    #[test]
    fn ignored_blocks_are_found() {
        assert_eq!(found("a.rs", "/// ```ignore\n/// f();\n/// ```\n"), 1);
        assert_eq!(found("a.rs", "//! ```rust,ignore\n//! ```\n"), 1);
        assert_eq!(found("README.md", "```rust, ignore\n```\n"), 1);
        assert_eq!(found("README.md", "```ignore-windows\n```\n"), 1);
    }
}
