//! Every `unsafe` has a proof, and crates without unsafe code forbid it.
//!
//! Clippy also requires proofs (`undocumented_unsafe_blocks`), but it does not check the bodies of
//! macros or code for other targets and features. This rule works on tokens and checks both.

use std::collections::HashSet;

use anyhow::{Context, Result};
use cargo_metadata::Package;
use proc_macro2::{Delimiter, LineColumn, TokenStream, TokenTree};

use super::Problem;
use super::source::SourceFile;
use super::tokens::{attributes, group, is_sign, is_word, line_of, mentions, visit_levels};

/// The crates without unsafe code.
const FORBIDS_UNSAFE: [&str; 4] = ["terrane", "terrane-bench", "terrane-layout", "xtask"];

/// Programs of these crates that call unsafe functions: of a driver or library in a baseline, or of
/// the store and its I/O queue.
const EXCEPTIONS: [(&str, &str); 3] =
    [("terrane-bench", "gpu"), ("terrane-bench", "nixl"), ("terrane-bench", "store")];

/// Checks that each `unsafe` has a `SAFETY:` comment, or a `# Safety` section in its documentation.
/// The proof is directly above it, above its statement, or on its own line.
///
/// Two uses need none. One is the type of a pointer to an unsafe function. The other is an `unsafe
/// fn` of a trait implementation, because the trait documents the caller's duties.
pub fn check(file: &SourceFile, tokens: &TokenStream) -> Vec<Problem> {
    let lines: Vec<&str> = file.text.lines().collect();
    let bodies = trait_implementations(tokens);
    let mut problems = Vec::new();
    visit_levels(tokens, &mut |level| {
        let implements = level.first().is_some_and(|first| bodies.contains(&position(first)));
        for (index, token) in level.iter().enumerate() {
            if !is_word(Some(token), "unsafe") || is_type(level, index) {
                continue;
            }
            let kind = kind(level, index);
            let line = line_of(token);
            let is_owed_by_trait = implements && kind == "fn";
            if !is_owed_by_trait && !has_proof(&lines, line) {
                let message = format!(
                    "an unsafe {kind} without a `// SAFETY:` comment or a `# Safety` section above it"
                );
                problems.push(Problem::at(&file.path, line, message));
            }
        }
    });
    problems
}

/// Whether any token of the file is `unsafe`.
pub fn contains_unsafe(file: &SourceFile) -> bool {
    file.tokens().is_some_and(|tokens| mentions(tokens, "unsafe"))
}

/// Checks that the crates above have `#![forbid(unsafe_code)]` in each of their roots, except the
/// exceptions.
pub fn check_forbidden(package: &Package) -> Result<Vec<Problem>> {
    if !FORBIDS_UNSAFE.contains(&package.name.as_str()) {
        return Ok(Vec::new());
    }
    let mut problems = Vec::new();
    let is_exempt = |name: &str| EXCEPTIONS.contains(&(package.name.as_str(), name));
    let roots = package.targets.iter().filter(|target| target.is_lib() || target.is_bin());
    for target in roots.filter(|target| !is_exempt(&target.name)) {
        let path = target.src_path.as_std_path();
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        if !forbids_unsafe(&SourceFile::new(path, text)) {
            problems.push(Problem::of(path, "lacks `#![forbid(unsafe_code)]`"));
        }
    }
    Ok(problems)
}

fn forbids_unsafe(file: &SourceFile) -> bool {
    let level: Vec<TokenTree> = file.tokens().cloned().into_iter().flatten().collect();
    attributes(&level).any(|attribute| {
        let words: Vec<TokenTree> = attribute.content.into_iter().collect();
        attribute.inner
            && is_word(words.first(), "forbid")
            && group(words.get(1), Delimiter::Parenthesis)
                .is_some_and(|lints| mentions(&lints.stream(), "unsafe_code"))
    })
}

/// Returns the positions of the first tokens in the bodies of `impl Trait for Type { … }`.
fn trait_implementations(tokens: &TokenStream) -> HashSet<LineColumn> {
    let mut bodies = HashSet::new();
    visit_levels(tokens, &mut |level| {
        for start in (0..level.len()).filter(|&start| is_word(level.get(start), "impl")) {
            let rest = level.get(start..).unwrap_or_default();
            let end = rest.iter().position(|token| group(Some(token), Delimiter::Brace).is_some());
            let Some((head, body)) = end.and_then(|end| Some((rest.get(..end)?, rest.get(end)?)))
            else {
                continue;
            };
            // `for<'a>` belongs to a bound.
            let of_trait = head
                .windows(2)
                .any(|pair| is_word(pair.first(), "for") && !is_sign(pair.get(1), '<'));
            if let TokenTree::Group(body) = body
                && of_trait
                && let Some(first) = body.stream().into_iter().next()
            {
                bodies.insert(position(&first));
            }
        }
    });
    bodies
}

fn position(token: &TokenTree) -> LineColumn {
    token.span().start()
}

/// Whether it is `unsafe fn(…)` or `unsafe extern "C" fn(…)`, the type of a function pointer.
fn is_type(level: &[TokenTree], unsafe_index: usize) -> bool {
    let mut next = unsafe_index + 1;
    if is_word(level.get(next), "extern") {
        next += 1;
        if matches!(level.get(next), Some(TokenTree::Literal(_))) {
            next += 1;
        }
    }
    is_word(level.get(next), "fn") && group(level.get(next + 1), Delimiter::Parenthesis).is_some()
}

fn kind(level: &[TokenTree], unsafe_index: usize) -> &'static str {
    let next = level.get(unsafe_index + 1);
    if is_word(next, "impl") {
        "impl"
    } else if is_word(next, "trait") {
        "trait"
    } else if is_word(next, "fn") || is_word(next, "const") || is_word(next, "async") {
        "fn"
    } else if is_word(next, "extern") {
        "extern item"
    } else if group(next, Delimiter::Parenthesis).is_some() {
        "attribute"
    } else if group(next, Delimiter::Brace).is_some() {
        "block"
    } else if is_sign(next, '$') {
        "item of a macro"
    } else {
        "item"
    }
}

/// Looks for the proof on the line itself. Then looks upwards through the beginning of the
/// statement and its attributes to the comment directly above.
fn has_proof(lines: &[&str], line: usize) -> bool {
    let is_proof = |text: &str| text.contains("SAFETY:") || text.contains("# Safety");
    let above = lines.get(..line.saturating_sub(1)).unwrap_or_default();
    let own = lines.get(line.saturating_sub(1)).copied().unwrap_or_default();
    if own.split_once("//").is_some_and(|(_, comment)| is_proof(comment)) {
        return true;
    }
    let mut in_comment = false;
    for text in above.iter().rev().map(|text| text.trim()) {
        if text.starts_with("//") {
            if is_proof(text) {
                return true;
            }
            in_comment = true;
        } else if in_comment || ends_statement(text) {
            return false;
        }
    }
    false
}

/// Whether a line of code ends the previous statement, so that a comment above it is not about the
/// line below it.
fn ends_statement(text: &str) -> bool {
    text.is_empty() || (text.ends_with([';', '{', '}', ',']) && !text.starts_with("#["))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<Problem> {
        let file = SourceFile::new("a.rs", text);
        check(&file, file.tokens().unwrap())
    }

    #[test]
    fn proven_code_passes() {
        let samples = [
            "// SAFETY: the pointer is valid.\nunsafe { read(pointer) }",
            "// SAFETY: the pointer is valid,\n// and aligned.\nlet x = unsafe { read(pointer) };",
            "// SAFETY: it is in bounds.\nlet x = call(\n    unsafe { get(1) }\n);",
            "unsafe { read() }; // SAFETY: as above.",
            "/// Reads.\n///\n/// # Safety\n///\n/// Valid.\n#[inline]\npub unsafe fn read() {}",
            "/// # Safety\n/// Promise it.\npub unsafe trait Memory {}",
            "// SAFETY: no interior pointers.\n#[allow(x)]\nunsafe impl Send for A {}",
            "type Call = unsafe extern \"C\" fn(u32) -> u32; type Other = unsafe fn(u32);",
            "let text = \"unsafe { }\"; // unsafe { }",
            "impl<F: for<'a> Fn(&'a u8)> Register for A<F> { fn a() {} unsafe fn span(&self) {} }",
        ];
        for sample in samples {
            assert_eq!(problems(sample), [], "{sample}");
        }
    }

    #[test]
    fn unproven_code_is_found() {
        let samples = [
            ("fn f() {\n    unsafe { read() }\n}", "block"),
            ("unsafe impl Send for A {}", "impl"),
            ("impl<F: for<'a> Fn(&'a u8)> A<F> { unsafe fn span(&self) {} }", "fn"),
            ("impl Register for A { fn a() { unsafe { b() } } }", "block"),
            ("/// Reads.\npub unsafe fn read() {}", "fn"),
            ("pub unsafe trait Memory {}", "trait"),
            ("unsafe extern \"C\" { fn f(); }", "extern item"),
            ("// SAFETY: this is about a.\na();\nunsafe { b() }", "block"),
            ("// SAFETY: far away.\n\nunsafe { b() }", "block"),
            ("let text = \"// SAFETY: in a string\";\nunsafe { b() }", "block"),
        ];
        for (sample, kind) in samples {
            let found = problems(sample);
            assert_eq!(found.len(), 1, "{sample}");
            assert!(found[0].message.contains(&format!("unsafe {kind} ")), "{}", found[0]);
        }
    }

    #[test]
    fn macro_bodies_are_seen() {
        let found = problems("macro_rules! m { ($x:expr) => { unsafe { $x } } }");
        assert_eq!(found.len(), 1);
    }

    #[test]
    fn each_unsafe_is_counted_with_its_line() {
        let found = problems("fn f() {\n    unsafe { a() };\n    unsafe { b() };\n}");
        assert_eq!(found.iter().map(|p| p.line).collect::<Vec<_>>(), [Some(2), Some(3)]);
    }

    #[test]
    fn a_forbidding_root_is_recognised() {
        let says = |text: &str| forbids_unsafe(&SourceFile::new("lib.rs", text));
        assert!(says("//! Doc.\n#![forbid(unsafe_code)]\n"));
        assert!(says("//! Doc.\n#![forbid(missing_docs, unsafe_code)]\n"));
        assert!(!says("//! Doc.\n#![deny(unsafe_code)]\n"));
        assert!(!says("//! `#![forbid(unsafe_code)]`\n"));
    }
}
