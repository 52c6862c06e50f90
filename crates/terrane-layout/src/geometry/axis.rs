//! The axes of a section and the names of sections.

use std::fmt;
use std::str::FromStr;

/// An axis of a section, with its own strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Axis {
    /// Blocks: the pages of the cache.
    Block,
    /// Layers of the model.
    Layer,
    /// KV heads of a token.
    Head,
    /// Tokens of a block.
    Token,
    /// Elements of one head of one token.
    Element,
}

impl Axis {
    /// All axes, from the outermost one of a block-first layout to the innermost one.
    pub const ALL: [Self; 5] = [Self::Block, Self::Layer, Self::Head, Self::Token, Self::Element];
}

terrane_core::display_names!(Axis {
    Self::Block => "block",
    Self::Layer => "layer",
    Self::Head => "head",
    Self::Token => "token",
    Self::Element => "element",
});

/// The most bytes of a section's name.
const LONGEST_NAME: usize = 15;

/// The name of a section. Two layouts convert section by section, by name.
///
/// A name has 1 to 15 characters: lower-case letters, digits, `-`, `_` and `.`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SectionName([u8; LONGEST_NAME]);

impl SectionName {
    /// Keys of attention.
    pub const K: Self = Self::known(b"k");
    /// Values of attention.
    pub const V: Self = Self::known(b"v");
    /// The compressed vector that serves as key and value (MLA).
    pub const LATENT: Self = Self::known(b"latent");
    /// Quantised elements whose scales are a separate section.
    pub const VALUES: Self = Self::known(b"values");
    /// Scales of quantised elements.
    pub const SCALES: Self = Self::known(b"scales");
    /// Scales of quantised keys.
    pub const K_SCALES: Self = Self::known(b"k-scales");
    /// Scales of quantised values of attention.
    pub const V_SCALES: Self = Self::known(b"v-scales");
    /// State of a convolution.
    pub const CONVOLUTION: Self = Self::known(b"conv");
    /// Recurrent state.
    pub const STATE: Self = Self::known(b"state");
    /// Bytes that no section describes. They are moved whole.
    pub const OPAQUE: Self = Self::known(b"opaque");

    /// Creates a name.
    ///
    /// # Errors
    ///
    /// [`InvalidSectionName`] for a text that is empty, too long, or has other characters.
    pub fn new(text: &str) -> Result<Self, InvalidSectionName> {
        let is_allowed = |byte: u8| {
            byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_' | b'.')
        };
        if text.is_empty() || text.len() > LONGEST_NAME || !text.bytes().all(is_allowed) {
            return Err(InvalidSectionName { text: text.chars().take(40).collect() });
        }
        let mut bytes = [0; LONGEST_NAME];
        bytes.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        Ok(Self(bytes))
    }

    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let length = self.0.iter().position(|&byte| byte == 0).unwrap_or(LONGEST_NAME);
        self.0.get(..length).and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or("")
    }

    /// Writes the length of the name (1 byte) and the name.
    pub(crate) fn encode(&self, encoded: &mut Vec<u8>) {
        let text = self.as_str();
        encoded.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
        encoded.extend(text.as_bytes());
    }

    const fn known(text: &[u8]) -> Self {
        let mut bytes = [0; LONGEST_NAME];
        let (to, _) = bytes.split_at_mut(text.len());
        to.copy_from_slice(text);
        Self(bytes)
    }
}

impl FromStr for SectionName {
    type Err = InvalidSectionName;

    fn from_str(text: &str) -> Result<Self, InvalidSectionName> {
        Self::new(text)
    }
}

impl fmt::Display for SectionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for SectionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SectionName({self})")
    }
}

/// A text that is not a valid section name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not the name of a section; use 1 to {LONGEST_NAME} lower-case letters, digits, \
     '-', '_' or '.'"
)]
pub struct InvalidSectionName {
    /// The text, at most its first 40 characters.
    pub text: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_displayed_unchanged() {
        for name in ["k", "scales", "a-b_c.9", "123456789012345"] {
            assert_eq!(SectionName::new(name).unwrap().as_str(), name);
        }
        for text in ["", "K", "a b", "1234567890123456", "é"] {
            assert!(SectionName::new(text).is_err(), "{text}");
        }
        assert_eq!(SectionName::K, "k".parse().unwrap());
    }
}
