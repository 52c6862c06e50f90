//! NIXL's memory types.

/// A memory type of NIXL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum MemoryType {
    /// Memory of the host, pageable or pinned (`DRAM_SEG`).
    Host,
    /// Memory of a device (`VRAM_SEG`).
    Device,
    /// A file (`FILE_SEG`).
    File,
    /// A block device (`BLK_SEG`).
    Block,
    /// An object in a store (`OBJ_SEG`).
    Object,
}

impl MemoryType {
    /// `None` for a type that is newer than this crate.
    pub(crate) fn from_raw(memory: nixl_sys::MemType) -> Option<Self> {
        use nixl_sys::MemType as M;
        Some(match memory {
            M::Dram => Self::Host,
            M::Vram => Self::Device,
            M::File => Self::File,
            M::Block => Self::Block,
            M::Object => Self::Object,
            M::Unknown => return None,
        })
    }

    pub(crate) fn into_raw(self) -> nixl_sys::MemType {
        match self {
            Self::Host => nixl_sys::MemType::Dram,
            Self::Device => nixl_sys::MemType::Vram,
            Self::File => nixl_sys::MemType::File,
            Self::Block => nixl_sys::MemType::Block,
            Self::Object => nixl_sys::MemType::Object,
        }
    }
}

terrane_core::display_names!(MemoryType {
    Self::Host => "host",
    Self::Device => "device",
    Self::File => "file",
    Self::Block => "block device",
    Self::Object => "object",
});
