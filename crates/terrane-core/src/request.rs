//! What is asked of an allocator.

use std::borrow::Cow;
use std::fmt;

use crate::{Alignment, ByteCount};

/// A request for one contiguous region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRequest {
    /// How many bytes. Zero is legal.
    pub bytes: ByteCount,
    /// What the region's beginning must be a multiple of.
    pub alignment: Alignment,
    /// What the region is for, as it appears in errors, traces and snapshots.
    pub label: Label,
    /// What is used as one piece, counted from the region's beginning: the stride of a block, of
    /// rows. Where an allocator makes a region of parts that a copy cannot cross, as a driver's
    /// registrations are, each part ends at a multiple of this, if a part can hold one. Zero says
    /// nothing.
    pub unit: ByteCount,
}

impl RegionRequest {
    /// A request for `bytes` bytes without demands on the alignment.
    #[must_use]
    pub fn new(bytes: ByteCount) -> Self {
        Self { bytes, alignment: Alignment::BYTE, label: Label::default(), unit: ByteCount::ZERO }
    }

    /// The same request at multiples of `alignment`.
    #[must_use]
    pub fn aligned_to(self, alignment: Alignment) -> Self {
        Self { alignment, ..self }
    }

    /// The same request for memory that is used in pieces of `unit` bytes.
    #[must_use]
    pub fn in_units_of(self, unit: ByteCount) -> Self {
        Self { unit, ..self }
    }

    /// The same request under this label.
    #[must_use]
    pub fn labelled(self, label: impl Into<Label>) -> Self {
        Self { label: label.into(), ..self }
    }
}

/// A short name of what memory is for.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Label(Cow<'static, str>);

impl Label {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&'static str> for Label {
    fn from(name: &'static str) -> Self {
        Self(Cow::Borrowed(name))
    }
}

impl From<String> for Label {
    fn from(name: String) -> Self {
        Self(Cow::Owned(name))
    }
}

impl fmt::Debug for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if self.0.is_empty() { "unlabelled" } else { &self.0 })
    }
}
