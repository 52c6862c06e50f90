//! Reads JSON in the dialect of Python's `json`.

use std::borrow::Cow;

use serde_json::{Map, Value};

use super::error::ModelError;

/// Words that Python's `json` writes for floats that JSON cannot represent. Published
/// configurations of recurrent models contain such words, but not in fields that this module reads.
const WORDS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];

/// The JSON object of the text.
pub(super) fn object(json: &[u8]) -> Result<Map<String, Value>, ModelError> {
    serde_json::from_slice(&without_words(json)).map_err(|source| ModelError::Json { source })
}

/// The text with `null` or 0 instead of these words. The length does not change, so positions stay
/// valid.
fn without_words(json: &[u8]) -> Cow<'_, [u8]> {
    let has_word = |word: &[u8]| json.windows(word.len()).any(|window| window == word);
    if !WORDS.iter().any(|word| has_word(word)) {
        return Cow::Borrowed(json);
    }
    let mut text = Vec::with_capacity(json.len());
    let (mut rest, mut in_string) = (json, false);
    while let [byte, after @ ..] = rest {
        if in_string && *byte == b'\\' {
            // An escaped quote does not end a string.
            let (escape, after) = rest.split_at(rest.len().min(2));
            text.extend_from_slice(escape);
            rest = after;
            continue;
        }
        if *byte == b'"' {
            in_string = !in_string;
        } else if !in_string
            && !text.last().is_some_and(|&last| is_of_number(last))
            && let Some(word) = WORDS.iter().find(|word| rest.starts_with(word))
        {
            // `NaN` is shorter than `null`, so a number replaces it.
            let stand_in: &[u8] = if word.len() < 4 { b"0" } else { b"null" };
            text.extend_from_slice(stand_in);
            text.extend(std::iter::repeat_n(b' ', word.len().saturating_sub(stand_in.len())));
            rest = rest.get(word.len()..).unwrap_or_default();
            continue;
        }
        text.push(*byte);
        rest = after;
    }
    Cow::Owned(text)
}

/// Whether a word behind this byte would continue a number, such as in `1NaN`.
fn is_of_number(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'+' | b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_python_are_replaced_outside_strings() {
        let json = br#"{"limit": [0.0, Infinity], "low": -Infinity, "a": NaN, "b": "NaN \" NaN"}"#;
        let object = object(json).unwrap();
        assert!(object["limit"][1].is_null() && object["low"].is_null());
        assert_eq!(object["a"], 0);
        assert_eq!(object["b"], "NaN \" NaN");
        assert_eq!(without_words(json).len(), json.len());
        assert!(super::object(br#"{"a": "Infinity"#).is_err());
        assert!(super::object(b"{Infinity").is_err());
        for invalid in [br#"{"a": 1NaN}"#.as_slice(), br#"{"a": 1.Infinity}"#, br#"{"a": +NaN}"#] {
            assert!(super::object(invalid).is_err(), "{}", invalid.escape_ascii());
        }
    }
}
