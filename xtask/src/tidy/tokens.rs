//! Helpers for Rust tokens. Strings and comments are no tokens of code, so they do not match.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// Calls `visit` with the tokens of the file and then of every group in it, macro bodies included.
pub fn visit_levels(stream: &TokenStream, visit: &mut impl FnMut(&[TokenTree])) {
    let level: Vec<TokenTree> = stream.clone().into_iter().collect();
    visit(&level);
    for token in &level {
        if let TokenTree::Group(group) = token {
            visit_levels(&group.stream(), visit);
        }
    }
}

/// Whether `token` is the identifier `word`.
pub fn is_word(token: Option<&TokenTree>, word: &str) -> bool {
    matches!(token, Some(TokenTree::Ident(ident)) if ident == word)
}

/// Whether `token` is the punctuation `sign`.
pub fn is_sign(token: Option<&TokenTree>, sign: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign)
}

/// Returns the group at `token`, if it has these delimiters.
pub fn group(token: Option<&TokenTree>, delimiter: Delimiter) -> Option<&Group> {
    match token {
        Some(TokenTree::Group(group)) if group.delimiter() == delimiter => Some(group),
        _ => None,
    }
}

/// Whether the word occurs anywhere in the stream.
pub fn mentions(stream: &TokenStream, word: &str) -> bool {
    let mut found = false;
    visit_levels(stream, &mut |level| {
        found |= level.iter().any(|token| is_word(Some(token), word));
    });
    found
}

/// Returns the line of a token, counted from 1.
pub fn line_of(token: &TokenTree) -> usize {
    token.span().start().line
}

/// An attribute, `#[…]` or `#![…]`.
pub struct Attribute {
    /// The index of its first token in its level.
    pub start: usize,
    /// The index of the first token after it.
    pub end: usize,
    /// The content of the brackets.
    pub content: TokenStream,
    /// Whether it is an inner attribute, `#![…]`.
    pub inner: bool,
}

/// Returns the attribute at `start`, if there is one.
pub fn attribute_at(level: &[TokenTree], start: usize) -> Option<Attribute> {
    if !is_sign(level.get(start), '#') {
        return None;
    }
    let inner = is_sign(level.get(start + 1), '!');
    let bracket = if inner { start + 2 } else { start + 1 };
    let content = group(level.get(bracket), Delimiter::Bracket)?.stream();
    Some(Attribute { start, end: bracket + 1, content, inner })
}

/// Returns all attributes of this level.
pub fn attributes(level: &[TokenTree]) -> impl Iterator<Item = Attribute> {
    (0..level.len()).filter_map(|start| attribute_at(level, start))
}
