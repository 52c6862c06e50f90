//! How system memory is to be brought up.

use std::num::NonZeroUsize;

use terrane_core::{Alignment, Wish};

use crate::numa::NodeId;

/// How system memory is to be brought up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemOptions {
    /// Which pages.
    pub huge_pages: HugePages,
    /// On which NUMA nodes.
    pub numa: NumaPolicy,
    /// Who touches the pages first.
    pub first_touch: FirstTouch,
}

/// Which pages memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Base pages only (`MADV_NOHUGEPAGE`).
    None,
    /// Huge pages that the kernel assembles by itself, for requests of at least one of them;
    /// such a region begins at a multiple of [`Alignment::HUGE_PAGE`].
    ///
    /// Without first touch nothing is assembled yet, and "granted" in the report says only that
    /// the kernel took the advice.
    Transparent(Wish),
    /// Huge pages that an administrator has reserved (hugetlbfs). Lengths are rounded up to whole
    /// pages. What is not reserved is replaced by transparent huge pages, unless required.
    Explicit(HugePageSize, Wish),
}

impl Default for HugePages {
    fn default() -> Self {
        Self::Transparent(Wish::Preferred)
    }
}

/// The size of an explicit huge page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePageSize {
    /// 2 MiB.
    Mib2,
    /// 1 GiB.
    Gib1,
}

impl HugePageSize {
    /// The size, which is the pages' alignment too.
    #[must_use]
    pub const fn alignment(self) -> Alignment {
        match self {
            Self::Mib2 => Alignment::HUGE_PAGE,
            Self::Gib1 => super::GIB,
        }
    }
}

/// On which NUMA nodes pages are to be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NumaPolicy {
    /// On the node of the thread that touches them first.
    #[default]
    Local,
    /// On one node. The threads that touch them run on that node's CPUs, or on the nearest if it
    /// has none.
    Bind(NodeId, Wish),
    /// Spread evenly over some nodes.
    Interleave(Vec<NodeId>, Wish),
}

/// Who touches pages first, and thereby makes the kernel find and zero them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FirstTouch {
    /// Nobody: pages come up as they are used, and running out of them is met by their user.
    None,
    /// As many threads as the process, or the node that the memory is bound to, has CPUs.
    #[default]
    AllCpus,
    /// This many threads.
    Threads(NonZeroUsize),
}
