//! Budgets: exact reservations against a limit, in trees that several tiers share.
//!
//! # How a reservation takes effect at one instant
//!
//! A refused request must never make a concurrent request fail that fits. Adding first and checking
//! afterwards breaks this rule at one level. Reserving level by level with a rollback breaks it in
//! a tree, because the child counts the bytes until the parent has decided.
//!
//! Here no reservation is rolled back. The root changes only by compare-and-swap. All levels below
//! one child of the root, a *branch*, change under the lock of that branch. The lock is held for a
//! few loads and stores. Every level below the root is checked, then the root decides by its
//! compare-and-swap, and only then are the levels below updated. Other branches can see only the
//! root. The same branch sees no intermediate state. Tiers that share a budget are separate
//! branches and never wait for one another.
//!
//! The alternatives and their cost are in `docs/decisions/0030-budget-trees.md`.

use std::fmt;
use std::iter;
use std::sync::Arc;

use terrane_core::{AllocateError, ByteCount, Label};

use crate::sync::{AtomicU64, Mutex, Ordering};

/// A limit on bytes in use, alone or as a part of a larger budget.
///
/// Cloning returns another handle to the same budget. Each operation takes effect at one instant on
/// every level; see [`reserve`](Self::reserve).
///
/// ```
/// use terrane_core::ByteCount;
/// use terrane_pool::adaptors::Budget;
///
/// let node = Budget::new("node", ByteCount::gib(8));
/// let pinned = node.child("pinned", ByteCount::gib(2));
/// let disk = node.child("disk", ByteCount::gib(7));
///
/// let staging = pinned.reserve(ByteCount::gib(2))?;
/// assert_eq!(disk.remaining(), ByteCount::gib(6));
/// assert_eq!(disk.reserve(ByteCount::gib(7)).unwrap_err().budget.as_str(), "node");
/// drop(staging);
/// assert!(disk.reserve(ByteCount::gib(7)).is_ok());
/// # Ok::<(), terrane_pool::adaptors::OverBudget>(())
/// ```
#[derive(Clone)]
pub struct Budget(Arc<Node>);

struct Node {
    label: Label,
    limit: AtomicU64,
    /// Bytes reserved here and below. The root's value changes by compare-and-swap. The values of
    /// other levels change only under the branch's lock.
    live: AtomicU64,
    peak: AtomicU64,
    /// `None` for the root.
    up: Option<Up>,
}

struct Up {
    parent: Budget,
    /// Shared by every level below one child of the root.
    branch: Arc<Mutex<()>>,
}

impl Budget {
    /// Creates a root budget of `limit` bytes. `u64::MAX` limits nothing, but the bytes are
    /// counted.
    #[must_use]
    pub fn new(label: impl Into<Label>, limit: ByteCount) -> Self {
        Self(Arc::new(Node::new(label.into(), limit, None)))
    }

    /// Creates a part of this budget. Bytes reserved from the part count here too. The limit of a
    /// part may exceed the limit of this budget, and so may the sum of the limits of several parts.
    #[must_use]
    pub fn child(&self, label: impl Into<Label>, limit: ByteCount) -> Self {
        let branch = match &self.0.up {
            Some(up) => Arc::clone(&up.branch),
            None => Arc::new(Mutex::new(())),
        };
        let up = Up { parent: self.clone(), branch };
        Self(Arc::new(Node::new(label.into(), limit, Some(up))))
    }

    /// Reserves `bytes` here and in every budget that this one is a part of. Zero bytes are always
    /// granted.
    ///
    /// # Errors
    ///
    /// [`OverBudget`] names the lowest budget that has too little left. It is exact: at one instant
    /// during the call, the bytes did not fit. No bytes were reserved at any time.
    pub fn reserve(&self, bytes: ByteCount) -> Result<Reservation, OverBudget> {
        self.add(bytes.get())?;
        Ok(Reservation { budget: self.clone(), bytes })
    }

    /// Checks whether `bytes` would be granted just now, without reserving them.
    ///
    /// # Errors
    ///
    /// [`OverBudget`] as from [`reserve`](Self::reserve).
    pub fn check(&self, bytes: ByteCount) -> Result<(), OverBudget> {
        let _branch = self.0.up.as_ref().map(|up| up.branch.lock());
        self.levels().try_for_each(|node| node.fits(bytes.get()).map(|_| ()))
    }

    /// Returns the name of the budget, for errors.
    #[must_use]
    pub fn label(&self) -> &Label {
        &self.0.label
    }

    /// Returns the limit.
    #[must_use]
    pub fn limit(&self) -> ByteCount {
        ByteCount::new(self.0.limit.load(Ordering::Relaxed))
    }

    /// Changes the limit. Bytes already reserved beyond a lower limit stay reserved.
    pub fn set_limit(&self, limit: ByteCount) {
        self.0.limit.store(limit.get(), Ordering::Relaxed);
    }

    /// Returns the bytes reserved here and below.
    #[must_use]
    pub fn live(&self) -> ByteCount {
        ByteCount::new(self.0.live.load(Ordering::Relaxed))
    }

    /// Returns the most bytes that were reserved at once since the budget was created, or since the
    /// last [`reset_peak`](Self::reset_peak).
    #[must_use]
    pub fn peak(&self) -> ByteCount {
        ByteCount::new(self.0.peak.load(Ordering::Relaxed))
    }

    /// Resets the peak to the bytes that are live.
    pub fn reset_peak(&self) {
        let node = &self.0;
        node.peak.store(node.live.load(Ordering::Relaxed), Ordering::Relaxed);
        // The store may overwrite the peak of a concurrent reservation, so the live bytes are
        // entered once more. Adding zero reads the latest value. It also orders the store above
        // before every later reservation's access to the peak.
        node.peak.fetch_max(node.live.fetch_add(0, Ordering::AcqRel), Ordering::Relaxed);
    }

    /// Returns the largest reservation that would be granted now at every level.
    #[must_use]
    pub fn remaining(&self) -> ByteCount {
        let _branch = self.0.up.as_ref().map(|up| up.branch.lock());
        let remaining = self.levels().map(Node::remaining).min().unwrap_or(u64::MAX);
        ByteCount::new(remaining)
    }

    fn add(&self, bytes: u64) -> Result<(), OverBudget> {
        let Some(up) = &self.0.up else {
            return self.0.add_as_root(bytes);
        };
        let _branch = up.branch.lock();
        self.below_root().try_for_each(|node| node.fits(bytes).map(|_| ()))?;
        self.levels().last().map_or(Ok(()), |root| root.add_as_root(bytes))?;
        for node in self.below_root() {
            let live = node.live.fetch_add(bytes, Ordering::AcqRel) + bytes;
            node.raise_peak(live);
        }
        Ok(())
    }

    fn release(&self, bytes: u64) {
        // Also under the lock: otherwise one level would show the freed bytes before the next.
        let _branch = self.0.up.as_ref().map(|up| up.branch.lock());
        for node in self.levels() {
            node.live.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// Iterates from this budget up to the root.
    fn levels(&self) -> impl Iterator<Item = &Node> {
        iter::successors(Some(&*self.0), |node| node.up.as_ref().map(|up| &*up.parent.0))
    }

    fn below_root(&self) -> impl Iterator<Item = &Node> {
        self.levels().take_while(|node| node.up.is_some())
    }
}

impl Node {
    fn new(label: Label, limit: ByteCount, up: Option<Up>) -> Self {
        let (live, peak) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { label, limit: AtomicU64::new(limit.get()), live, peak, up }
    }

    /// Returns the live bytes after adding `bytes`.
    fn fits(&self, bytes: u64) -> Result<u64, OverBudget> {
        self.fits_on(self.live.load(Ordering::Relaxed), bytes)
    }

    fn fits_on(&self, live: u64, bytes: u64) -> Result<u64, OverBudget> {
        let limit = self.limit.load(Ordering::Relaxed);
        match live.checked_add(bytes) {
            Some(sum) if sum <= limit || bytes == 0 => Ok(sum),
            _ => Err(OverBudget {
                budget: self.label.clone(),
                requested: ByteCount::new(bytes),
                live: ByteCount::new(live),
                limit: ByteCount::new(limit),
            }),
        }
    }

    fn add_as_root(&self, bytes: u64) -> Result<(), OverBudget> {
        let mut live = self.live.load(Ordering::Relaxed);
        loop {
            let sum = self.fits_on(live, bytes)?;
            // The counter guards no memory: the counted bytes pass between threads with their own
            // synchronisation. The ordering serves the peak, which may be reset meanwhile.
            match self.live.compare_exchange_weak(live, sum, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    self.raise_peak(sum);
                    return Ok(());
                }
                Err(current) => live = current,
            }
        }
    }

    fn raise_peak(&self, live: u64) {
        // The load leaves the cache line shared unless there is a new peak.
        if live > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(live, Ordering::Relaxed);
        }
    }

    fn remaining(&self) -> u64 {
        let limit = self.limit.load(Ordering::Relaxed);
        // A limit that was lowered below the live bytes leaves zero, which is the true remainder.
        limit.saturating_sub(self.live.load(Ordering::Relaxed))
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "budget {}: {} of {} in use", self.label(), self.live(), self.limit())
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("label", self.label())
            .field("limit", &self.limit())
            .field("live", &self.live())
            .field("parent", &self.0.up.as_ref().map(|up| &up.parent))
            .finish()
    }
}

/// Bytes reserved from a [`Budget`], released on drop.
#[must_use = "a reservation that is dropped is released"]
#[derive(Debug)]
pub struct Reservation {
    budget: Budget,
    bytes: ByteCount,
}

impl Reservation {
    /// Returns the number of bytes reserved.
    #[must_use]
    pub fn bytes(&self) -> ByteCount {
        self.bytes
    }

    /// Returns the budget that the bytes are reserved from.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Changes this reservation to `bytes` bytes.
    ///
    /// # Errors
    ///
    /// [`OverBudget`] if it would grow by more than is left. The reservation then stays as it was.
    /// Shrinking always succeeds.
    pub fn resize(&mut self, bytes: ByteCount) -> Result<(), OverBudget> {
        match (bytes.checked_sub(self.bytes), self.bytes.checked_sub(bytes)) {
            (Some(more), _) => self.budget.add(more.get())?,
            (None, Some(less)) => self.budget.release(less.get()),
            (None, None) => {}
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Moves `bytes` into a separate reservation. Returns `None` if there are fewer. The bytes stay
    /// reserved throughout.
    #[must_use]
    pub fn split(&mut self, bytes: ByteCount) -> Option<Self> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Self { budget: self.budget.clone(), bytes })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.release(self.bytes.get());
    }
}

/// The error of a budget that has too little left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the budget {budget} of {limit} refuses {requested}: {live} are live; \
     free some or raise the limit"
)]
pub struct OverBudget {
    /// The budget that refused: this budget, or one that contains it.
    pub budget: Label,
    /// The bytes requested.
    pub requested: ByteCount,
    /// The bytes reserved from it.
    pub live: ByteCount,
    /// Its limit.
    pub limit: ByteCount,
}

impl OverBudget {
    /// Converts the refusal into an error of an allocation with this label.
    pub(crate) fn for_label(self, label: Label) -> AllocateError {
        let Self { budget, requested, live, limit } = self;
        AllocateError::OverBudget { budget, requested, live, limit, label }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn bytes(count: u64) -> ByteCount {
        ByteCount::new(count)
    }

    #[test]
    fn the_last_byte_is_granted_and_the_next_is_not() {
        let budget = Budget::new("all", bytes(100));
        let most = budget.reserve(bytes(99)).unwrap();
        let last = budget.reserve(bytes(1)).unwrap();
        let refused = budget.reserve(bytes(1)).unwrap_err();
        assert_eq!((refused.live, refused.limit), (bytes(100), bytes(100)));
        assert!(budget.reserve(ByteCount::ZERO).is_ok());
        drop((most, last));
        assert_eq!((budget.live(), budget.peak()), (ByteCount::ZERO, bytes(100)));
    }

    #[test]
    fn a_sum_beyond_64_bits_is_refused() {
        let budget = Budget::new("unlimited", bytes(u64::MAX));
        let _all = budget.reserve(bytes(u64::MAX)).unwrap();
        assert!(budget.reserve(bytes(1)).is_err());
    }

    #[test]
    fn a_refusal_at_the_root_leaves_the_child_as_it_was() {
        let root = Budget::new("root", bytes(10));
        let child = root.child("child", bytes(100));
        let grandchild = child.child("grandchild", bytes(100));
        let refused = grandchild.reserve(bytes(11)).unwrap_err();
        assert_eq!(refused.budget.as_str(), "root");
        assert_eq!((grandchild.live(), child.peak()), (ByteCount::ZERO, ByteCount::ZERO));

        let held = grandchild.reserve(bytes(4)).unwrap();
        assert_eq!((root.live(), child.live(), grandchild.live()), (bytes(4), bytes(4), bytes(4)));
        assert_eq!(child.remaining(), bytes(6));
        assert!(child.check(bytes(6)).is_ok());
        assert!(child.check(bytes(7)).is_err());
        drop(held);
        assert_eq!(root.live(), ByteCount::ZERO);
    }

    #[test]
    fn reservations_resize_and_split_without_a_gap() {
        let budget = Budget::new("all", bytes(10));
        let mut whole = budget.reserve(bytes(4)).unwrap();
        whole.resize(bytes(10)).unwrap();
        assert!(whole.resize(bytes(11)).is_err());
        assert_eq!(whole.bytes(), bytes(10));
        let part = whole.split(bytes(7)).unwrap();
        assert!(whole.split(bytes(4)).is_none());
        assert_eq!((whole.bytes(), part.bytes(), budget.live()), (bytes(3), bytes(7), bytes(10)));
        drop(whole);
        assert_eq!(budget.live(), bytes(7));
    }

    #[test]
    fn a_lowered_limit_leaves_nothing() {
        let budget = Budget::new("all", bytes(10));
        let held = budget.reserve(bytes(8)).unwrap();
        budget.set_limit(bytes(5));
        assert_eq!(budget.remaining(), ByteCount::ZERO);
        assert!(budget.reserve(bytes(1)).is_err());
        assert!(budget.reserve(ByteCount::ZERO).is_ok());
        drop(held);
        budget.reset_peak();
        assert_eq!((budget.remaining(), budget.peak()), (bytes(5), ByteCount::ZERO));
    }
}
