//! The code has no placeholder and no debugging macro.

use proc_macro2::TokenStream;

use super::Problem;
use super::source::SourceFile;
use super::tokens::{is_sign, is_word, line_of, visit_levels};

const BANNED: [(&str, &str); 3] = [
    ("todo", "implement it, or return a typed error that says it is unsupported"),
    ("unimplemented", "implement it, or return a typed error that says it is unsupported"),
    ("dbg", "remove it"),
];

/// Finds calls of the banned macros.
pub fn check(file: &SourceFile, tokens: &TokenStream) -> Vec<Problem> {
    let mut problems = Vec::new();
    visit_levels(tokens, &mut |level| {
        for pair in level.windows(2) {
            let [name, bang] = pair else { continue };
            for (word, advice) in BANNED {
                if is_word(Some(name), word) && is_sign(Some(bang), '!') {
                    let message = format!("`{word}!` is left over; {advice}");
                    problems.push(Problem::at(&file.path, line_of(name), message));
                }
            }
        }
    });
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> usize {
        let file = SourceFile::new("a.rs", text);
        check(&file, file.tokens().unwrap()).len()
    }

    #[test]
    fn placeholders_are_found() {
        assert_eq!(found("fn f() { todo!() }"), 1);
        assert_eq!(found("fn f() { unimplemented!(\"later\"); std::dbg!(1); }"), 2);
        assert_eq!(found("macro_rules! m { () => { todo!() } }"), 1);
    }

    #[test]
    fn words_and_strings_are_not() {
        assert_eq!(found("/// Not a `todo!()`.\nfn todo() { call(\"dbg!(x)\"); } // todo!()"), 0);
    }
}
