//! The I/Os that a storage backend has.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::BackendConfig;

/// How many descriptors a backend may have in flight, over all engines of an agent, and how many it
/// has.
///
/// POSIX makes its I/Os beforehand, one for each descriptor in flight. A request for which too few
/// are left fails as it is posted, with no more than "backend error".
#[derive(Debug)]
pub(crate) struct Ios {
    most: usize,
    taken: AtomicUsize,
}

/// What is used of those that POSIX makes if it is told no number, which are more ([`MOST`]): four
/// requests of the usual size.
const USUAL: usize = 4 * 4096;

/// As many as POSIX makes at most, whatever number it is told. A request that has more fails in the
/// middle, with the first of its I/Os on their way.
const MOST: usize = 65_536;

impl Ios {
    /// Those of a backend of this configuration; `None` where nothing is known of a limit.
    pub(super) fn of(config: &BackendConfig) -> Option<Arc<Self>> {
        if config.name.as_str() != "POSIX" {
            return None;
        }
        let size = config.parameters.iter().find(|parameter| parameter.key == "ios_pool_size");
        let most = size.and_then(|size| size.value.trim().parse().ok()).unwrap_or(USUAL);
        Some(Arc::new(Self { most: most.clamp(1, MOST), taken: AtomicUsize::new(0) }))
    }

    /// How many there are.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Takes so many, if they are left.
    pub(crate) fn take(self: &Arc<Self>, count: usize) -> Option<TakenIos> {
        let and_these = |taken: usize| taken.checked_add(count).filter(|sum| *sum <= self.most);
        // Whoever finds them free comes after the release of the request that had them.
        self.taken.fetch_update(Ordering::Acquire, Ordering::Relaxed, and_these).ok()?;
        Some(TakenIos { of: Arc::clone(self), count })
    }
}

/// I/Os that a request has, until this drops.
#[derive(Debug)]
pub(crate) struct TakenIos {
    of: Arc<Ios>,
    count: usize,
}

impl Drop for TakenIos {
    fn drop(&mut self) {
        self.of.taken.fetch_sub(self.count, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_are_taken_than_there_are() {
        let config = BackendConfig::new("POSIX").parameter("ios_pool_size", "10");
        let ios = Ios::of(&config).unwrap();
        let (six, none) = (ios.take(6).unwrap(), ios.take(5));
        assert!(none.is_none());
        let four = ios.take(4).unwrap();
        assert!(ios.take(1).is_none());
        drop(six);
        assert!(ios.take(6).is_some() && ios.take(usize::MAX).is_none());
        drop(four);
        assert!(ios.take(10).is_some());
        assert_eq!(Ios::of(&BackendConfig::new("POSIX")).unwrap().most(), USUAL);
        assert!(Ios::of(&BackendConfig::new("UCX")).is_none());
    }

    #[test]
    fn no_more_are_counted_on_than_posix_makes() {
        for (told, most) in [("65536", MOST), ("65537", MOST), ("18446744073709551615", MOST)] {
            let config = BackendConfig::new("POSIX").parameter("ios_pool_size", told);
            assert_eq!(Ios::of(&config).unwrap().most(), most, "{told}");
        }
    }
}
