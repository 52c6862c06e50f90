//! Requests to allocators.

use std::borrow::Cow;
use std::fmt;

use crate::bytes::alignment::Alignment;
use crate::bytes::byte_count::ByteCount;

/// A request for one contiguous region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionRequest {
    /// The number of bytes. Zero is legal.
    pub bytes: ByteCount,
    /// The alignment of the region's beginning.
    pub alignment: Alignment,
    /// The purpose of the region, for errors, traces and snapshots.
    pub label: Label,
    /// The size of the pieces in which the region is used, counted from its beginning: for example,
    /// the stride of a block or row. Some allocators build a region of parts that a copy cannot
    /// cross, such as a driver's registrations. Each part then ends at a multiple of this size, if
    /// a part can contain a whole piece. Zero means no preference.
    pub unit: ByteCount,
}

impl RegionRequest {
    /// A request for `bytes` bytes with any alignment.
    #[must_use]
    pub fn new(bytes: ByteCount) -> Self {
        Self { bytes, alignment: Alignment::BYTE, label: Label::default(), unit: ByteCount::ZERO }
    }

    /// The same request with this alignment.
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

/// A short name for the purpose of memory.
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
