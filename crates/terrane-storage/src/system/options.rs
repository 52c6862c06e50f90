//! Options for system memory.

use std::num::NonZeroUsize;

use terrane_core::{Alignment, Requirement};

use crate::numa::NodeId;

/// 1 GiB: the largest huge page, and the maximum alignment.
pub(super) const GIB: Alignment = match Alignment::new(1 << 30) {
    Ok(alignment) => alignment,
    Err(_) => Alignment::HUGE_PAGE,
};

/// Options for system memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SystemOptions {
    /// The kind of pages.
    pub huge_pages: HugePages,
    /// The NUMA nodes of the pages.
    pub numa: NumaPolicy,
    /// The threads that touch the pages first.
    pub first_touch: FirstTouch,
}

/// The kind of pages of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HugePages {
    /// Base pages only (`MADV_NOHUGEPAGE`).
    None,
    /// Huge pages that the kernel assembles on its own, for requests of at least one huge page.
    /// Such a region begins at a multiple of [`Alignment::HUGE_PAGE`].
    ///
    /// Without first touch no huge page is assembled yet. "Granted" in the report then only means
    /// that the kernel accepted the advice.
    Transparent(Requirement),
    /// Huge pages that an administrator has reserved (hugetlbfs). Lengths are rounded up to whole
    /// pages. Transparent huge pages replace them if too few are reserved, unless they are
    /// required.
    Explicit(HugePageSize, Requirement),
}

impl Default for HugePages {
    fn default() -> Self {
        Self::Transparent(Requirement::Preferred)
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
    /// The size. It is also the alignment of the pages.
    #[must_use]
    pub const fn alignment(self) -> Alignment {
        match self {
            Self::Mib2 => Alignment::HUGE_PAGE,
            Self::Gib1 => GIB,
        }
    }
}

/// The NUMA nodes of the pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum NumaPolicy {
    /// The node of the thread that touches a page first.
    #[default]
    Local,
    /// One node. The threads that touch the pages run on that node's CPUs, or on those of the
    /// nearest node with CPUs.
    Bind(NodeId, Requirement),
    /// Pages interleaved over several nodes.
    Interleave(Vec<NodeId>, Requirement),
}

/// The threads that touch pages first. The touch makes the kernel allocate and zero the pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FirstTouch {
    /// No thread. Pages are allocated on first use. If memory runs out then, the kernel may kill
    /// the process.
    None,
    /// One thread for each CPU of the process, or of the node that the memory is bound to.
    #[default]
    AllCpus,
    /// This many threads.
    Threads(NonZeroUsize),
}
