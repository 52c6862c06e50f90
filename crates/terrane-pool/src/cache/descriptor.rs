//! The data that a block in use carries with it.
//!
//! When a block returns, its record is rarely in a CPU cache. Reading its class from the record
//! takes longer than the rest of the release. So a block in use has a reference to a descriptor in
//! addition to its record. The pool has one set of descriptors for each class and label. They are
//! in a CPU cache, and two words are passed in registers.

use std::ptr::NonNull;
use std::sync::OnceLock;

use terrane_core::Memory;

use crate::cache::shared_cache::SharedCache;
use crate::pool::record::UNPOOLED;
use crate::tags::{TAGS, Tag};

/// How a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockUse {
    /// The host alone uses the block. A hit and a release neither read nor write its record.
    Plain,
    /// Streams may use the block, as its record lists, or the block is not pooled.
    Listed,
}

/// The data that all blocks in use of one class, label and kind of use share.
pub(crate) struct BlockDescriptor<M: Memory> {
    /// The owner of the descriptor.
    pub(crate) cache: NonNull<SharedCache<M>>,
    pub(crate) class: usize,
    /// The bytes of a block; zero if it is not pooled.
    pub(crate) weight: u64,
    pub(crate) tag: Tag,
    pub(crate) usage: BlockUse,
}

// SAFETY: the pointer is used only as a shared reference, and all threads may use a shared cache.
unsafe impl<M: Memory> Send for BlockDescriptor<M> {}

// SAFETY: as for `Send`.
unsafe impl<M: Memory> Sync for BlockDescriptor<M> {}

/// A reference to a [`BlockDescriptor`] that is valid as long as its shared cache.
pub(crate) struct DescriptorRef<M: Memory>(NonNull<BlockDescriptor<M>>);

impl<M: Memory> Clone for DescriptorRef<M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M: Memory> Copy for DescriptorRef<M> {}

// SAFETY: the value is a shared reference except for its lifetime, and all threads may use a
// descriptor.
unsafe impl<M: Memory> Send for DescriptorRef<M> {}

// SAFETY: as for `Send`.
unsafe impl<M: Memory> Sync for DescriptorRef<M> {}

impl<M: Memory> DescriptorRef<M> {
    /// Returns the descriptor.
    ///
    /// # Safety
    ///
    /// The shared cache of the descriptor must be alive for `'cache`.
    #[inline]
    pub(crate) unsafe fn get<'cache>(self) -> &'cache BlockDescriptor<M> {
        // SAFETY: the shared cache owns the descriptor and does not move it. The caller promises
        // that the cache is alive.
        unsafe { self.0.as_ref() }
    }
}

/// The descriptors of a shared cache. The descriptors of a label are created when it is first used.
pub(crate) struct Descriptors<M: Memory>(Box<[OnceLock<ClassDescriptors<M>>]>);

/// Two descriptors for each class, and two for blocks that are not pooled.
type ClassDescriptors<M> = Box<[[BlockDescriptor<M>; 2]]>;

impl<M: Memory> Descriptors<M> {
    pub(crate) fn new() -> Self {
        Self((0..TAGS).map(|_| OnceLock::new()).collect())
    }

    /// Returns the descriptor of a block of `class`, or of a block that is not pooled. `self` must
    /// be the descriptors of `cache`.
    #[inline]
    pub(crate) fn get(
        &self,
        cache: &SharedCache<M>,
        class: usize,
        tag: Tag,
        usage: BlockUse,
    ) -> DescriptorRef<M> {
        let all = self.0[tag.index()].get_or_init(|| make(cache, tag));
        // The last descriptors are for blocks that are not pooled.
        let [plain, listed] = &all[class.min(all.len() - 1)];
        DescriptorRef(NonNull::from(match usage {
            BlockUse::Plain => plain,
            BlockUse::Listed => listed,
        }))
    }
}

#[cold]
fn make<M: Memory>(cache: &SharedCache<M>, tag: Tag) -> ClassDescriptors<M> {
    let table = &cache.table;
    let pooled = (0..table.len()).map(|class| (class, table.size(class)));
    let all = pooled.chain([(UNPOOLED, 0)]);
    let cache = NonNull::from(cache);
    let descriptors = |(class, weight)| {
        [BlockUse::Plain, BlockUse::Listed].map(|usage| BlockDescriptor {
            cache,
            class,
            weight,
            tag,
            usage,
        })
    };
    all.map(descriptors).collect()
}

terrane_core::debug_fields!(Descriptors<M: Memory> {});
