//! Backends, as they are asked for and as they are.

use std::fmt;

use terrane_core::BackendName;

/// A backend that an agent is to have: its name, its parameters, and how much depends on it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a configuration does nothing until it is given to an `AgentBuilder`"]
pub struct BackendConfig {
    pub(crate) name: BackendName,
    pub(crate) parameters: Vec<(String, String)>,
    pub(crate) demand: Demand,
    pub(crate) file_access: FileAccess,
}

impl BackendConfig {
    /// The backend of this name, as NIXL spells it: `"UCX"`, `"POSIX"`, `"GDS_MT"`.
    pub fn new(name: impl Into<BackendName>) -> Self {
        let name = name.into();
        let file_access = FileAccess::usual(&name);
        Self { name, parameters: Vec::new(), demand: Demand::IfSupported, file_access }
    }

    /// Sets a parameter of the backend.
    pub fn parameter(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.parameters.push((key.into(), value.into()));
        self
    }

    /// Every registration fails that this backend does not accept.
    pub fn required(self) -> Self {
        Self { demand: Demand::Required, ..self }
    }

    /// By which descriptor the backend reaches files.
    pub fn file_access(self, file_access: FileAccess) -> Self {
        Self { file_access, ..self }
    }
}

/// How much a registration depends on a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Demand {
    /// It accepts, or the registration fails.
    Required,
    /// If it takes the memory; otherwise the record says why not.
    #[default]
    IfSupported,
}

/// By which descriptor a backend reaches a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileAccess {
    /// Through the page cache; offsets and lengths are free.
    Buffered,
    /// Around the page cache, which demands alignment of offsets, lengths and addresses.
    Direct,
}

impl FileAccess {
    /// GDS moves data around the page cache; the others take what comes.
    fn usual(name: &BackendName) -> Self {
        match name.as_str() {
            "GDS" | "GDS_MT" => Self::Direct,
            _ => Self::Buffered,
        }
    }
}

/// A type of memory, as NIXL divides it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum MemoryType {
    /// Memory of the host, pageable or pinned.
    Host,
    /// Memory of a device.
    Device,
    /// A file.
    File,
    /// A block device.
    Block,
    /// An object in a store.
    Object,
}

impl MemoryType {
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

impl fmt::Display for MemoryType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Host => "host",
            Self::Device => "device",
            Self::File => "file",
            Self::Block => "block device",
            Self::Object => "object",
        })
    }
}
