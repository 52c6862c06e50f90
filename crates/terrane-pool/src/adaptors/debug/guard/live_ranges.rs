//! Live spans, ordered by location.

use std::collections::BTreeMap;

use terrane_core::{Position, Span};

/// Live spans that do not overlap, each with a value.
///
/// Empty spans have no position and are not entered.
#[derive(Debug)]
pub(crate) struct LiveRanges<T> {
    ranges: BTreeMap<Position, (Span, T)>,
}

impl<T> LiveRanges<T> {
    pub(crate) const fn new() -> Self {
        Self { ranges: BTreeMap::new() }
    }

    /// Returns the live span that overlaps `span`, if there is one.
    pub(crate) fn overlapping(&self, span: &Span) -> Option<&T> {
        let place = span.location.position();
        // As the live spans are disjoint, only the two neighbours can overlap.
        let before = self.ranges.range(..=place).next_back();
        let after = self.ranges.range(place..).next();
        let mut neighbours = before.into_iter().chain(after);
        neighbours.find_map(|(_, (live, value))| live.overlaps(span).then_some(value))
    }

    /// Enters a span that overlaps no live span.
    pub(crate) fn insert(&mut self, span: Span, value: T) {
        if !span.length.is_zero() {
            self.ranges.insert(span.location.position(), (span, value));
        }
    }

    pub(crate) fn remove(&mut self, span: &Span) -> Option<T> {
        if span.length.is_zero() {
            return None;
        }
        self.ranges.remove(&span.location.position()).map(|(_, value)| value)
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = &T> {
        self.ranges.values().map(|(_, value)| value)
    }

    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrane_core::{ByteCount, DeviceAddress, DeviceId, Location, StorageKind};

    fn span(address: u64, length: u64) -> Span {
        let device = DeviceId::new(0);
        Span {
            kind: StorageKind::Device(device),
            location: Location::Device { device, address: DeviceAddress::new(address) },
            length: ByteCount::new(length),
        }
    }

    #[test]
    fn neighbours_touch_and_do_not_overlap() {
        let mut ranges = LiveRanges::new();
        ranges.insert(span(100, 10), 'a');
        ranges.insert(span(120, 10), 'b');
        ranges.insert(span(100, 0), 'z');
        assert_eq!(ranges.len(), 2);
        for (start, length, expected) in [
            (110, 10, None),
            (110, 11, Some('b')),
            (90, 10, None),
            (90, 11, Some('a')),
            (105, 1, Some('a')),
            (90, 100, Some('a')),
            (105, 0, None),
        ] {
            let value = ranges.overlapping(&span(start, length)).copied();
            assert_eq!(value, expected, "{length} from {start}");
        }
        assert_eq!(ranges.remove(&span(100, 0)), None);
        assert_eq!(ranges.remove(&span(100, 10)), Some('a'));
    }
}
