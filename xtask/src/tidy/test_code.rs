//! Tests run the same code as users, and a disabled test states its reason.
//!
//! `cfg(test)` is permitted only on a test module. Anywhere else, tests would run other code than
//! users. `#[ignore]` must have a reason, which the summary of the run shows.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::Problem;
use super::source::SourceFile;
use super::tokens::{
    Attribute, attribute_at, attributes, group, is_sign, is_word, line_of, mentions, visit_levels,
};

/// Finds `cfg(test)` outside test modules and `#[ignore]` without a reason.
pub fn check(file: &SourceFile, tokens: &TokenStream) -> Vec<Problem> {
    let mut problems = Vec::new();
    visit_levels(tokens, &mut |level| {
        for attribute in attributes(level) {
            let line = level.get(attribute.start).map_or(1, line_of);
            if let Some(message) = attribute_problem(level, &attribute) {
                problems.push(Problem::at(&file.path, line, message));
            }
        }
        for triple in level.windows(3) {
            let [cfg, bang, condition] = triple else {
                continue;
            };
            if is_word(Some(cfg), "cfg") && is_sign(Some(bang), '!') && is_about_tests(condition) {
                problems.push(Problem::at(&file.path, line_of(cfg), OUTSIDE));
            }
        }
    });
    problems
}

const OUTSIDE: &str = "`cfg(test)` outside `#[cfg(test)] mod …`: tests must run the code that \
                       users run; make what varies a parameter";

const UNEXPLAINED: &str = "`#[ignore]` without a reason; write `#[ignore = \"needs …\"]`";

fn attribute_problem(level: &[TokenTree], attribute: &Attribute) -> Option<&'static str> {
    let content: Vec<TokenTree> = attribute.content.clone().into_iter().collect();
    let condition = content.get(1).filter(|condition| is_about_tests(condition));
    if is_word(content.first(), "cfg")
        && let Some(condition) = condition
    {
        let allowed =
            !attribute.inner && holds_only_in_tests(condition) && is_module(level, attribute.end);
        return (!allowed).then_some(OUTSIDE);
    }
    if is_word(content.first(), "cfg_attr") {
        let arguments = group(content.get(1), Delimiter::Parenthesis)?.stream();
        let arguments: Vec<TokenTree> = arguments.into_iter().collect();
        let (condition, rest) = split_at_comma(&arguments);
        if condition.iter().any(is_about_tests) || is_word(condition.first(), "test") {
            return Some(OUTSIDE);
        }
        return is_bare_ignore(rest).then_some(UNEXPLAINED);
    }
    is_bare_ignore(&content).then_some(UNEXPLAINED)
}

/// Whether a `(…)` contains the word `test`.
fn is_about_tests(condition: &TokenTree) -> bool {
    matches!(condition, TokenTree::Group(group) if mentions(&group.stream(), "test"))
}

/// Whether the condition is `(test)` or `(all(test, …))`.
fn holds_only_in_tests(condition: &TokenTree) -> bool {
    let TokenTree::Group(condition) = condition else {
        return false;
    };
    let condition: Vec<TokenTree> = condition.stream().into_iter().collect();
    match condition.as_slice() {
        [only] => is_word(Some(only), "test"),
        [all, TokenTree::Group(parts)] if is_word(Some(all), "all") => {
            let parts: Vec<TokenTree> = parts.stream().into_iter().collect();
            let (first, rest) = split_at_comma(&parts);
            matches!(first, [word] if is_word(Some(word), "test"))
                && !rest.iter().any(is_about_tests)
        }
        _ => false,
    }
}

/// Whether a module begins at `index`, after optional attributes and visibility.
fn is_module(level: &[TokenTree], mut index: usize) -> bool {
    while let Some(attribute) = attribute_at(level, index) {
        index = attribute.end;
    }
    if is_word(level.get(index), "pub") {
        index += 1;
        if group(level.get(index), Delimiter::Parenthesis).is_some() {
            index += 1;
        }
    }
    is_word(level.get(index), "mod")
}

fn is_bare_ignore(tokens: &[TokenTree]) -> bool {
    is_word(tokens.first(), "ignore") && !is_sign(tokens.get(1), '=')
}

/// Returns the parts before and after the first comma.
fn split_at_comma(tokens: &[TokenTree]) -> (&[TokenTree], &[TokenTree]) {
    let comma = tokens.iter().position(|token| is_sign(Some(token), ',')).unwrap_or(tokens.len());
    let (head, tail) = tokens.split_at(comma);
    (head, tail.get(1..).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<String> {
        let file = SourceFile::new("a.rs", text);
        check(&file, file.tokens().unwrap()).into_iter().map(|problem| problem.message).collect()
    }

    #[test]
    fn test_modules_and_explained_ignores_pass() {
        let samples = [
            "#[cfg(test)] mod tests { #[test] fn a() {} }",
            "#[cfg(test)]\n#[allow(x)]\npub(crate) mod tests;",
            "#[cfg(all(test, not(loom)))] mod tests {}",
            "#[cfg(loom)] use loom::sync::Arc;",
            "#[cfg(feature = \"test\")] fn f() {}",
            "#[test] #[ignore = \"needs two GPUs\"] fn a() {}",
            "#[cfg_attr(miri, ignore = \"no io_uring\")] #[test] fn a() {}",
            "fn f() { call(\"cfg!(test)\"); } // #[cfg(test)] fn",
        ];
        for sample in samples {
            assert!(messages(sample).is_empty(), "{sample}");
        }
    }

    #[test]
    fn test_only_code_elsewhere_is_found() {
        let samples = [
            "#[cfg(test)] fn helper() {}",
            "#[cfg(test)] use std::sync::Arc;",
            "#[cfg(not(test))] mod real {}",
            "#[cfg(any(test, feature = \"x\"))] mod support {}",
            "#[cfg(all(test, not(test)))] mod never {}",
            "fn f() { if cfg!(test) { g() } }",
            "#![cfg(test)]",
            "#![cfg_attr(test, allow(x))]",
            "#[cfg_attr(not(test), inline)] fn f() {}",
            "struct A { #[cfg(test)] probe: u32 }",
        ];
        for sample in samples {
            assert_eq!(messages(sample), [OUTSIDE], "{sample}");
        }
    }

    #[test]
    fn silent_ignores_are_found() {
        assert_eq!(messages("#[test] #[ignore] fn a() {}"), [UNEXPLAINED]);
        assert_eq!(messages("#[test] #[cfg_attr(miri, ignore)] fn a() {}"), [UNEXPLAINED]);
    }
}
