//! Facts about endpoints, computed once for each.

use std::sync::RwLock;

use rustc_hash::FxHashMap;
use terrane_core::sync::unpoisoned;

use crate::hazard::endpoint::{Endpoint, EndpointId, WeakEndpoint};

/// Values that an engine has computed about endpoints. Each is dropped some time after its
/// endpoint.
///
/// A value is cheap to clone, like an [`Arc`](std::sync::Arc).
#[derive(Debug)]
pub struct EndpointCache<T> {
    entries: RwLock<CacheEntries<T>>,
}

#[derive(Debug)]
struct CacheEntries<T> {
    by_endpoint: FxHashMap<EndpointId, (WeakEndpoint, T)>,
    /// At this number of entries, the next insert removes those of dropped endpoints.
    sweep_at: usize,
}

/// Below this number of entries, none are removed.
pub(crate) const MIN_SWEPT: usize = 16;

impl<T> Default for EndpointCache<T> {
    fn default() -> Self {
        let entries = CacheEntries { by_endpoint: FxHashMap::default(), sweep_at: MIN_SWEPT };
        Self { entries: RwLock::new(entries) }
    }
}

impl<T: Clone> EndpointCache<T> {
    /// Returns the value of an endpoint, if there is one.
    pub fn get(&self, endpoint: &Endpoint) -> Option<T> {
        let entries = unpoisoned(self.entries.read());
        entries.by_endpoint.get(&endpoint.id()).map(|(_, value)| value.clone())
    }

    /// Stores a value while the endpoint exists. Returns it, or the value that another thread
    /// inserted first.
    pub fn insert(&self, endpoint: &Endpoint, value: T) -> T {
        let mut entries = unpoisoned(self.entries.write());
        let dropped = entries.take_dropped();
        let weak = || (endpoint.downgrade(), value.clone());
        let (_, kept) = entries.by_endpoint.entry(endpoint.id()).or_insert_with(weak);
        let kept = kept.clone();
        drop(entries);
        // Drops of values may be slow, so they run without the lock.
        drop((dropped, value));
        kept
    }
}

impl<T> CacheEntries<T> {
    /// Removes the entries of dropped endpoints, if there are enough entries.
    fn take_dropped(&mut self) -> Vec<(WeakEndpoint, T)> {
        if self.by_endpoint.len() < self.sweep_at {
            return Vec::new();
        }
        let dropped = self.by_endpoint.extract_if(|_, (endpoint, _)| endpoint.has_gone());
        let dropped = dropped.map(|(_, entry)| entry).collect();
        self.sweep_at = 2 * self.by_endpoint.len() + MIN_SWEPT;
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
    fn values_of_dropped_endpoints_are_dropped() {
        let (cache, value) = (EndpointCache::default(), Arc::new(()));
        for _ in 0..10 * MIN_SWEPT {
            cache.insert(&endpoint(), Arc::clone(&value));
        }
        assert!(Arc::strong_count(&value) <= MIN_SWEPT + 2, "{}", Arc::strong_count(&value));
    }
}
