//! Facts about endpoints, computed once for each.

use std::sync::RwLock;

use rustc_hash::FxHashMap;
use terrane_core::sync::unpoisoned;

use crate::hazard::endpoint::{Endpoint, EndpointId, WeakEndpoint};

/// Values that an engine has computed about endpoints: about each, or about `ENDS` of them together,
/// such as the two ends of a transfer. Each is dropped some time after its endpoint.
///
/// A value is cheap to clone, like an [`Arc`](std::sync::Arc).
#[derive(Debug)]
pub struct EndpointCache<T, const ENDS: usize = 1> {
    entries: RwLock<CacheEntries<T, ENDS>>,
}

#[derive(Debug)]
struct CacheEntries<T, const ENDS: usize> {
    by_ends: FxHashMap<[EndpointId; ENDS], ([WeakEndpoint; ENDS], T)>,
    /// At this number of entries, the next insert removes those of dropped endpoints.
    sweep_at: usize,
}

/// Below this number of entries, none are removed.
pub(crate) const MIN_SWEPT: usize = 16;

impl<T, const ENDS: usize> Default for EndpointCache<T, ENDS> {
    fn default() -> Self {
        let entries = CacheEntries { by_ends: FxHashMap::default(), sweep_at: MIN_SWEPT };
        Self { entries: RwLock::new(entries) }
    }
}

impl<T: Clone> EndpointCache<T> {
    /// Returns the value of an endpoint, if there is one.
    pub fn get(&self, endpoint: &Endpoint) -> Option<T> {
        self.get_together([endpoint])
    }

    /// Stores a value while the endpoint exists. Returns it, or the value that another thread
    /// inserted first.
    pub fn insert(&self, endpoint: &Endpoint, value: T) -> T {
        self.insert_together([endpoint], value)
    }
}

impl<T: Clone, const ENDS: usize> EndpointCache<T, ENDS> {
    /// Returns the value of these endpoints in this order, if there is one.
    pub fn get_together(&self, ends: [&Endpoint; ENDS]) -> Option<T> {
        let entries = unpoisoned(self.entries.read());
        entries.by_ends.get(&ends.map(Endpoint::id)).map(|(_, value)| value.clone())
    }

    /// Stores a value while all of these endpoints exist. Returns it, or the value that another
    /// thread inserted first.
    pub fn insert_together(&self, ends: [&Endpoint; ENDS], value: T) -> T {
        let mut entries = unpoisoned(self.entries.write());
        let dropped = entries.take_dropped();
        let weak = || (ends.map(Endpoint::downgrade), value.clone());
        let (_, kept) = entries.by_ends.entry(ends.map(Endpoint::id)).or_insert_with(weak);
        let kept = kept.clone();
        drop(entries);
        // Drops of values may be slow, so they run without the lock.
        drop((dropped, value));
        kept
    }
}

impl<T, const ENDS: usize> CacheEntries<T, ENDS> {
    /// Removes the entries of dropped endpoints, if there are enough entries.
    fn take_dropped(&mut self) -> Vec<T> {
        if self.by_ends.len() < self.sweep_at {
            return Vec::new();
        }
        let dropped =
            self.by_ends.extract_if(|_, (ends, _)| ends.iter().any(WeakEndpoint::has_gone));
        let dropped = dropped.map(|(_, (_, value))| value).collect();
        self.sweep_at = 2 * self.by_ends.len() + MIN_SWEPT;
        dropped
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use terrane_layout::{ElementFormat, LayoutBuilder, LayoutConfig};
    use terrane_testkit::memory::HeapAllocator;

    use super::*;

    #[expect(clippy::unwrap_used, reason = "tests say what they expect by unwrapping it")]
    fn endpoint() -> Endpoint {
        let config = LayoutConfig::builder().num_blocks(1).num_layers(1).outer_dim(1);
        let config = config.page_size(1).inner_dim(1).element(ElementFormat::Width(2));
        let layout = LayoutBuilder::new(config.build().unwrap()).fully_contiguous();
        Endpoint::new(layout.allocate(&HeapAllocator::system()).unregistered().build().unwrap())
            .unwrap()
    }

    #[test]
    fn the_first_value_of_an_endpoint_is_kept() {
        let (cache, one, other) = (EndpointCache::default(), endpoint(), endpoint());
        assert_eq!(cache.get(&one), None);
        assert_eq!([cache.insert(&one, 1), cache.insert(&one, 2)], [1, 1]);
        assert_eq!((cache.get(&one), cache.get(&other)), (Some(1), None));
    }

    #[test]
    fn a_value_of_two_endpoints_is_found_in_their_order() {
        let (cache, one, other) = (EndpointCache::<_, 2>::default(), endpoint(), endpoint());
        assert_eq!(cache.insert_together([&one, &other], 1), 1);
        assert_eq!(cache.get_together([&one, &other]), Some(1));
        assert_eq!(cache.get_together([&other, &one]), None);
    }

    #[test]
    fn values_of_dropped_endpoints_are_dropped() {
        let (cache, value) = (EndpointCache::default(), Arc::new(()));
        for _ in 0..10 * MIN_SWEPT {
            cache.insert(&endpoint(), Arc::clone(&value));
        }
        assert!(Arc::strong_count(&value) <= MIN_SWEPT + 2, "{}", Arc::strong_count(&value));
    }
}
