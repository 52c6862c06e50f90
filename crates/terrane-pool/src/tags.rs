//! Labels as small numbers, so that a block can carry one at no cost.

use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use dashmap::DashMap;
use rustc_hash::FxBuildHasher;
use terrane_core::Label;

use crate::sync::Mutex;

/// The number of labels that one pool distinguishes. Further labels are counted together.
pub(crate) const TAGS: usize = 64;

/// A label in the table of a pool, from [`Pool::tag`](crate::Pool::tag). It is valid only for that
/// pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(u8);

impl Tag {
    /// No label.
    pub const NONE: Self = Self(0);
    /// All labels beyond the pool's limit of distinct labels.
    pub const OTHER: Self = Self(1);

    /// The index in a table of [`TAGS`].
    #[inline]
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Whether bytes of a tag became live, or stopped being live.
#[derive(Clone, Copy, Debug)]
pub(crate) enum LiveBytes {
    Added,
    Removed,
}

/// Live bytes by tag: bytes allocated by one thread minus bytes released by it, so a value may be
/// negative.
///
/// The values are statistics, and order no other memory access.
#[derive(Debug)]
pub(crate) struct Tally([AtomicI64; TAGS]);

impl Default for Tally {
    fn default() -> Self {
        Self([const { AtomicI64::new(0) }; TAGS])
    }
}

impl Tally {
    /// Counts bytes that became live, or stopped being live. Only one thread may call this at a
    /// time.
    #[inline]
    pub(crate) fn count(&self, tag: Tag, bytes: u64, change: LiveBytes) {
        let Some(count) = self.0.get(tag.index()) else { return };
        // Two's complement: the sum over all threads is correct even if one value wraps.
        let before = count.load(Ordering::Relaxed);
        let after = match change {
            LiveBytes::Added => before.wrapping_add_unsigned(bytes),
            LiveBytes::Removed => before.wrapping_sub_unsigned(bytes),
        };
        count.store(after, Ordering::Relaxed);
    }

    /// Adds this to `sums`, whose first entry belongs to the first tag.
    pub(crate) fn add_to(&self, sums: &mut [i64]) {
        for (sum, count) in sums.iter_mut().zip(&self.0) {
            *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
        }
    }
}

/// The labels of one pool.
///
/// It is read at each request whose label differs from the thread's previous one, and rarely
/// written. A sharded map suits this use.
pub(crate) struct TagTable {
    tags: DashMap<Label, Tag, FxBuildHasher>,
    names: Mutex<Vec<Label>>,
    /// The number of names. It is written under the lock of the names.
    known: AtomicUsize,
}

impl TagTable {
    pub(crate) fn new() -> Self {
        let names = vec![Label::default(), Label::from("other labels")];
        let known = AtomicUsize::new(names.len());
        Self { tags: DashMap::with_hasher(FxBuildHasher), names: Mutex::new(names), known }
    }

    /// Returns the tag of `label`, a new one if the limit allows.
    pub(crate) fn tag(&self, label: &Label) -> Tag {
        if label.as_str().is_empty() {
            return Tag::NONE;
        }
        if let Some(tag) = self.tags.get(label) {
            return *tag;
        }
        let mut names = self.names.lock();
        // Another thread may have added it first.
        if let Some(tag) = self.tags.get(label) {
            return *tag;
        }
        match u8::try_from(names.len()) {
            Ok(number) if names.len() < TAGS => {
                names.push(label.clone());
                // Set before any bytes can be counted under the tag.
                self.known.store(names.len(), Ordering::Release);
                self.tags.insert(label.clone(), Tag(number));
                Tag(number)
            }
            _ => Tag::OTHER,
        }
    }

    /// Returns the number of tags in use; zero unless a label other than none and [`Tag::OTHER`]
    /// exists.
    pub(crate) fn known(&self) -> usize {
        let known = self.known.load(Ordering::Acquire);
        if known > usize::from(Tag::OTHER.0) + 1 { known } else { 0 }
    }

    /// Returns the labels of the tags with these numbers, in that order.
    pub(crate) fn named<T>(&self, values: Vec<(usize, T)>) -> Vec<(Label, T)> {
        let names = self.names.lock();
        let label = |(tag, value): (usize, T)| Some((names.get(tag)?.clone(), value));
        values.into_iter().filter_map(label).collect()
    }
}

impl fmt::Debug for TagTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names.lock().iter()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn labels_beyond_the_table_are_counted_together() {
        let table = TagTable::new();
        assert_eq!(table.tag(&Label::default()), Tag::NONE);
        assert_eq!(table.known(), 0, "there is nothing to sum up");
        let first = table.tag(&Label::from("kv"));
        assert_eq!(table.tag(&Label::from("kv".to_owned())), first);
        for number in 0..100 {
            table.tag(&Label::from(format!("label {number}")));
        }
        assert_eq!(table.tag(&Label::from("one more")), Tag::OTHER);
        assert_eq!(table.known(), TAGS);
        let named = table.named(vec![(first.index(), 5), (TAGS, 6)]);
        assert_eq!(named, [(Label::from("kv"), 5)], "no tag has that number");
    }
}
