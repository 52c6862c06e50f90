//! Labels as small numbers, so that a block can carry one at no cost.

use std::fmt;

use dashmap::DashMap;
use rustc_hash::FxBuildHasher;
use terrane_core::Label;

use crate::sync::Mutex;

/// How many labels one pool tells apart. Later ones are counted together.
pub(crate) const TAGS: usize = 64;

/// A label that a pool knows, from [`Pool::tag`](crate::Pool::tag). It means nothing to another
/// pool than the one that it came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(u8);

impl Tag {
    /// No label.
    pub const NONE: Self = Self(0);
    /// Labels that came after the pool had learned all it can tell apart.
    pub const OTHER: Self = Self(1);

    /// The place in a table of [`TAGS`].
    #[inline]
    pub(crate) fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The labels of one pool.
///
/// Looked up on each labelled request whose label is not the thread's previous one, and hardly
/// ever written: what a sharded map is good at.
pub(crate) struct TagTable {
    tags: DashMap<Label, Tag, FxBuildHasher>,
    names: Mutex<Vec<Label>>,
}

impl TagTable {
    pub(crate) fn new() -> Self {
        let names = vec![Label::default(), Label::from("other labels")];
        Self { tags: DashMap::with_hasher(FxBuildHasher), names: Mutex::new(names) }
    }

    /// The tag of `label`, a new one if there are any left.
    pub(crate) fn tag(&self, label: &Label) -> Tag {
        if label.as_str().is_empty() {
            return Tag::NONE;
        }
        if let Some(tag) = self.tags.get(label) {
            return *tag;
        }
        let mut names = self.names.lock();
        // Another thread may have been first.
        if let Some(tag) = self.tags.get(label) {
            return *tag;
        }
        match u8::try_from(names.len()) {
            Ok(number) if names.len() < TAGS => {
                names.push(label.clone());
                self.tags.insert(label.clone(), Tag(number));
                Tag(number)
            }
            _ => Tag::OTHER,
        }
    }

    /// The labels by the place of their tags.
    pub(crate) fn names(&self) -> Vec<Label> {
        self.names.lock().clone()
    }
}

impl fmt::Debug for TagTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn labels_beyond_the_table_are_counted_together() {
        let table = TagTable::new();
        assert_eq!(table.tag(&Label::default()), Tag::NONE);
        let first = table.tag(&Label::from("kv"));
        assert_eq!(table.tag(&Label::from("kv".to_owned())), first);
        for number in 0..100 {
            table.tag(&Label::from(format!("label {number}")));
        }
        assert_eq!(table.tag(&Label::from("one more")), Tag::OTHER);
        assert_eq!(table.names().len(), TAGS);
    }
}
