//! The data that a block in use carries with it.
//!
//! When a block returns, its record is rarely in a CPU cache, and reading its class there takes
//! longer than the rest of the release. So a block in use carries, beside its record, a reference
//! to a line of a table. The pool has one line for each class and label. These lines are in a
//! cache, and two words move in registers.

use std::fmt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use terrane_core::Memory;

use crate::record::UNPOOLED;
use crate::stock::Stock;
use crate::tags::{TAGS, Tag};

/// How a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// By the host alone. The record holds the bytes requested.
    Plain,
    /// By the host alone, all of the block's bytes. The record is not even written.
    Whole,
    /// Streams may use the block, as its record lists, or the block is not pooled.
    Apart,
}

/// The data that all blocks in use of one class, label and kind of use share.
pub(crate) struct CapabilityStatus<M: Memory> {
    /// The owner of this.
    pub(crate) stock: NonNull<Stock<M>>,
    pub(crate) class: usize,
    /// The bytes of a block; zero if it is not pooled.
    pub(crate) weight: u64,
    pub(crate) tag: Tag,
    pub(crate) is: Use,
}

impl<M: Memory> Clone for CapabilityStatus<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for CapabilityStatus<M> {}

// SAFETY: the pointer is used only as a shared reference, and all threads may use a stock.
unsafe impl<M: Memory> Send for CapabilityStatus<M> {}

// SAFETY: as for `Send`.
unsafe impl<M: Memory> Sync for CapabilityStatus<M> {}

/// A reference to a [`CapabilityStatus`] that is valid as long as its stock is.
pub(crate) struct GrantRef<M: Memory>(NonNull<CapabilityStatus<M>>);

impl<M: Memory> Clone for GrantRef<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for GrantRef<M> {}

// SAFETY: it is a shared reference except for its lifetime, and all threads may use a grant.
unsafe impl<M: Memory> Send for GrantRef<M> {}

// SAFETY: as for `Send`.
unsafe impl<M: Memory> Sync for GrantRef<M> {}

impl<M: Memory> GrantRef<M> {
    /// Returns the grant.
    ///
    /// # Safety
    ///
    /// The stock that it came from is alive.
    #[inline]
    pub(crate) unsafe fn get(self) -> CapabilityStatus<M> {
        // SAFETY: the stock owns the grant and does not move it. The caller promises that it is
        // alive.
        unsafe { *self.0.as_ref() }
    }
}

/// The grants of a stock. Those of a label are made when it is first used.
pub(crate) struct Grants<M: Memory>(Box<[OnceLock<Lines<M>>]>);

/// Three grants for each class, and three for blocks that are not pooled.
type Lines<M> = Box<[[CapabilityStatus<M>; 3]]>;

impl<M: Memory> Grants<M> {
    pub(crate) fn new() -> Self {
        Self((0..TAGS).map(|_| OnceLock::new()).collect())
    }

    /// Returns the grant of a block of `class`, or of one that is not pooled. These must be the
    /// grants of `stock`.
    #[inline]
    pub(crate) fn get(&self, stock: &Stock<M>, class: usize, tag: Tag, is: Use) -> GrantRef<M> {
        let lines = self.0[tag.index()].get_or_init(|| lines(stock, tag));
        // The last grants are for blocks that are not pooled.
        let [plain, whole, apart] = &lines[class.min(lines.len() - 1)];
        GrantRef(NonNull::from(match is {
            Use::Plain => plain,
            Use::Whole => whole,
            Use::Apart => apart,
        }))
    }
}

#[cold]
fn lines<M: Memory>(stock: &Stock<M>, tag: Tag) -> Lines<M> {
    let table = &stock.table;
    let pooled = (0..table.len()).map(|class| (class, table.size(class)));
    let all = pooled.chain([(UNPOOLED, 0)]);
    let stock = NonNull::from(stock);
    let line = |(class, weight)| {
        [Use::Plain, Use::Whole, Use::Apart].map(|is| CapabilityStatus {
            stock,
            class,
            weight,
            tag,
            is,
        })
    };
    all.map(line).collect()
}

impl<M: Memory> fmt::Debug for Grants<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grants").finish_non_exhaustive()
    }
}
