//! The maximum number of I/Os in flight of a storage backend.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::config::BackendConfig;

/// The maximum number of I/Os of a backend, over all engines of an agent, and the number in use.
///
/// POSIX allocates its I/Os beforehand, one for each descriptor in flight. If too few are left for
/// a request, posting it fails with only "backend error".
///
/// GDS allocates its batches beforehand, each with a fixed number of I/Os, and a request uses whole
/// batches. If cuFile copies through the host, each I/O also uses a bounce buffer. A post for which
/// too few buffers are free never returns.
#[derive(Debug)]
pub(crate) struct IoLimit {
    max: usize,
    /// The minimum that a request uses.
    min: usize,
    /// The longest I/O, in bytes; a longer descriptor uses several.
    longest: u64,
    in_use: AtomicUsize,
    /// The I/Os of leaked requests, which stay in use.
    lost: AtomicUsize,
}

/// The used part of POSIX's default pool, which is larger ([`POSIX_MOST`]): four requests of the
/// default size.
const POSIX_DEFAULT: usize = 4 * 4096;

/// The maximum that POSIX allocates, whatever its parameter is. A request of more descriptors fails
/// midway, with the first of its I/Os in flight.
const POSIX_MOST: usize = 65_536;

/// cuFile's default number of bounce buffers of its largest class, 16 MiB
/// (`posix_pool_slab_count`). It has more of the smaller classes.
const GDS_DEFAULT: usize = 32;

/// GDS's defaults: the number of batches (`batch_pool_size`), the I/Os in each batch
/// (`batch_limit`), and the bytes after which it splits a descriptor (`max_request_size`).
const GDS_BATCHES: usize = 16;
const GDS_BATCH: usize = 128;
const GDS_LONGEST: usize = 16 << 20;

/// Direct I/O works on whole pages.
const PAGE: usize = 4096;

impl IoLimit {
    /// Returns the limit of a backend with this configuration; `None` if none is known.
    pub(super) fn of(config: &BackendConfig) -> Option<Arc<Self>> {
        let parameter = |key: &str| {
            let found = config.parameters.iter().find(|parameter| parameter.key == key);
            found.and_then(|parameter| parameter.value.trim().parse::<usize>().ok())
        };
        let (max, min, longest) = match config.name.as_str() {
            "POSIX" => {
                let most = parameter("ios_pool_size").unwrap_or(POSIX_DEFAULT);
                (most.clamp(1, POSIX_MOST), 1, usize::MAX)
            }
            "GDS" => {
                // A configuration that sets the batch size is assumed to have as many bounce
                // buffers.
                let most = parameter("batch_limit").unwrap_or(GDS_DEFAULT.min(GDS_BATCH)).max(1);
                let batches = parameter("batch_pool_size").unwrap_or(GDS_BATCHES).max(1);
                let longest = parameter("max_request_size").unwrap_or(GDS_LONGEST).max(PAGE);
                (most, most.div_ceil(batches), longest)
            }
            _ => return None,
        };
        let longest = longest.try_into().unwrap_or(u64::MAX);
        let (in_use, lost) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Some(Arc::new(Self { max, min, longest, in_use, lost }))
    }

    /// The I/Os that leaked requests do not keep.
    fn left(&self) -> usize {
        self.max.saturating_sub(self.lost.load(Ordering::Relaxed))
    }

    /// Whether enough I/Os are left for a request, once all others have ended.
    pub(crate) fn has_enough(&self) -> bool {
        self.left() >= self.min
    }

    /// The maximum number of descriptors and bytes, up to the requested ones, that one request may
    /// have. They fit into the I/Os that are left, at any offsets.
    pub(crate) fn request_limits(&self, descriptors: usize, bytes: u64) -> (usize, u64) {
        let left = self.left();
        // Half of the I/Os are kept for splits of descriptors.
        let half = u64::try_from(left / 2).unwrap_or(u64::MAX).max(1);
        let bytes = bytes.min(self.longest.saturating_mul(half));
        (descriptors.min(left.saturating_sub(self.splits(bytes))).max(1), bytes)
    }

    /// The maximum number of I/Os that splits can add for this many bytes.
    fn splits(&self, bytes: u64) -> usize {
        (bytes.saturating_sub(1) / self.longest).try_into().unwrap_or(usize::MAX)
    }

    /// Reserves the I/Os of a request, if enough are left.
    pub(crate) fn reserve(self: &Arc<Self>, descriptors: usize, bytes: u64) -> Option<ReservedIos> {
        let count = descriptors.checked_add(self.splits(bytes))?.max(self.min);
        let and_these = |in_use: usize| in_use.checked_add(count).filter(|sum| *sum <= self.max);
        // Acquire: pairs with the release by the request that used the I/Os before.
        self.in_use.fetch_update(Ordering::Acquire, Ordering::Relaxed, and_these).ok()?;
        Some(ReservedIos { of: Arc::clone(self), count })
    }
}

/// I/Os that are in use until this drops.
#[derive(Debug)]
pub(crate) struct ReservedIos {
    of: Arc<IoLimit>,
    count: usize,
}

impl ReservedIos {
    /// Counts the I/Os as lost, because their request is leaked and this value never drops.
    pub(crate) fn lose(&self) {
        self.of.lost.fetch_add(self.count, Ordering::Relaxed);
    }
}

impl Drop for ReservedIos {
    fn drop(&mut self) {
        self.of.in_use.fetch_sub(self.count, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, parameters: &[(&str, &str)]) -> Arc<IoLimit> {
        let config = parameters
            .iter()
            .fold(BackendConfig::new(name), |config, (key, value)| config.parameter(*key, *value));
        IoLimit::of(&config).unwrap()
    }

    #[test]
    fn no_more_ios_are_reserved_than_the_limit() {
        let ios = of("POSIX", &[("ios_pool_size", "10")]);
        let (six, none) = (ios.reserve(6, 1 << 40).unwrap(), ios.reserve(5, 1));
        assert!(none.is_none());
        let four = ios.reserve(4, 1).unwrap();
        assert!(ios.reserve(1, 1).is_none());
        drop(six);
        assert!(ios.reserve(6, 1).is_some() && ios.reserve(usize::MAX, 1).is_none());
        drop(four);
        assert!(ios.reserve(10, 1).is_some());
        assert_eq!(of("POSIX", &[]).request_limits(usize::MAX, 7), (POSIX_DEFAULT, 7));
        assert!(IoLimit::of(&BackendConfig::new("UCX")).is_none());
    }

    #[test]
    fn the_limit_is_at_most_what_posix_allocates() {
        for (told, most) in [("100000", POSIX_MOST), ("65537", POSIX_MOST), ("65536", POSIX_MOST)] {
            let ios = of("POSIX", &[("ios_pool_size", told)]);
            assert_eq!(ios.request_limits(usize::MAX, 1).0, most);
            assert!(ios.reserve(most + 1, 1).is_none() && ios.reserve(most, 1).is_some());
        }
    }

    #[test]
    fn requests_fit_into_the_ios_that_are_not_lost() {
        let gds = of("GDS", &[("batch_limit", "8"), ("batch_pool_size", "2")]);
        for ios in [of("POSIX", &[("ios_pool_size", "10")]), gds] {
            while ios.has_enough() {
                let (descriptors, bytes) = ios.request_limits(usize::MAX, u64::MAX);
                drop(ios.reserve(descriptors, bytes).unwrap());
                let leaked = std::mem::ManuallyDrop::new(ios.reserve(1, 1).unwrap());
                leaked.lose();
            }
            assert!(ios.reserve(1, 1).is_none(), "{ios:?}");
            assert_eq!(ios.request_limits(usize::MAX, 1), (1, 1));
        }
    }

    #[test]
    fn gds_has_no_more_in_flight_than_cufile_has_buffers() {
        let ios = of("GDS", &[]);
        // Splits divide 128 MiB at most eight times, and one time less beyond the initial
        // descriptors.
        let (descriptors, bytes) = ios.request_limits(16_384, 128 << 20);
        assert_eq!((descriptors, bytes), (GDS_DEFAULT - 7, 128 << 20));
        let all = ios.reserve(descriptors, bytes).unwrap();
        assert!(ios.reserve(1, 1).is_none());
        drop(all);
        // Each request uses one of sixteen batches.
        let batches: Vec<_> = (0..GDS_BATCHES).map(|_| ios.reserve(1, 4096).unwrap()).collect();
        assert!(ios.reserve(1, 4096).is_none());
        drop(batches);
        assert!(ios.reserve(GDS_DEFAULT, 4096).is_some());
    }

    #[test]
    fn a_request_within_its_limits_can_be_reserved_with_any_configuration_of_gds() {
        for batch in ["1", "2", "3", "128", "512"] {
            for (longest, wanted) in [("4096", u64::MAX), ("16777216", 128 << 20), ("1", 4096)] {
                let ios = of("GDS", &[("batch_limit", batch), ("max_request_size", longest)]);
                let (descriptors, bytes) = ios.request_limits(usize::MAX, wanted);
                assert!(descriptors > 0 && bytes > 0, "{batch} {longest}: {ios:?}");
                assert!(ios.reserve(descriptors, bytes).is_some(), "{batch} {longest}: {ios:?}");
            }
        }
    }
}
