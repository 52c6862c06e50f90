//! Backends, as they are asked for.

use std::fmt;

use terrane_core::BackendName;

/// A backend that an agent is to have: its name, its parameters, and how much depends on it.
///
/// `"UCX"` has a parameter that need not be stated: `engine_config`, with settings of UCX's, begins with
/// `CUDA_IPC_ENABLE_GET_ZCOPY=y`, without which device memory of other processes would be read by TCP where
/// the device has no NVLinks. What is stated ([unchecked](Self::unchecked_parameter), as the plugin does not
/// name it) follows, and decides where it says otherwise.
///
/// ```
/// use terrane_nixl::BackendConfig;
///
/// let posix = BackendConfig::new("POSIX").parameter("use_uring", "true");
/// let required = BackendConfig::new("GDS_MT").required();
/// # let _ = (posix, required);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a configuration does nothing until it is given to an `AgentBuilder`"]
pub struct BackendConfig {
    pub(crate) name: BackendName,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) demand: Demand,
    pub(crate) file_access: FileAccess,
}

/// A parameter of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) key: String,
    pub(crate) value: String,
    /// Whether the plugin has to know it.
    pub(crate) checked: bool,
}

impl BackendConfig {
    /// The backend of this name, as NIXL spells it: `"UCX"`, `"POSIX"`, `"GDS_MT"`.
    pub fn new(name: impl Into<BackendName>) -> Self {
        let name = name.into();
        let file_access = FileAccess::usual(&name);
        Self { name, parameters: Vec::new(), demand: Demand::IfSupported, file_access }
    }

    /// Sets a parameter that the backend's plugin names among its own. Another one is refused when
    /// the agent is built: NIXL would ignore it.
    ///
    /// The value is the backend's to check; some ignore a value that they cannot use.
    pub fn parameter(self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.with(key.into(), value.into(), true)
    }

    /// Sets a parameter that the backend's plugin need not name, for what it reads and does not
    /// list.
    pub fn unchecked_parameter(self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.with(key.into(), value.into(), false)
    }

    /// Makes every registration fail that this backend does not accept.
    pub fn required(self) -> Self {
        Self { demand: Demand::Required, ..self }
    }

    /// By which descriptor the backend reaches files. GDS and GDS_MT go around the page cache
    /// unless told otherwise, all others through it.
    pub fn file_access(self, file_access: FileAccess) -> Self {
        Self { file_access, ..self }
    }

    /// The backend's name.
    #[must_use]
    pub fn name(&self) -> &BackendName {
        &self.name
    }

    fn with(mut self, key: String, value: String, checked: bool) -> Self {
        self.parameters.push(Parameter { key, value, checked });
        self
    }
}

/// How much a registration depends on a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Demand {
    /// It accepts the memory, or the registration fails.
    Required,
    /// It may refuse the memory, if another backend accepts it; the record says why.
    #[default]
    IfSupported,
}

/// By which descriptor a backend reaches a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileAccess {
    /// Through the page cache. Offsets and lengths are free.
    Buffered,
    /// Around the page cache, which wants offsets, lengths and host addresses aligned. A file
    /// without a direct descriptor is refused.
    Direct,
}

impl FileAccess {
    /// GDS moves data between a drive and a device; the page cache would be a detour.
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
