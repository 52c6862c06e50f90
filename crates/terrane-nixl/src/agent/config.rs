//! Configurations of backends.

use terrane_core::BackendName;

/// The configuration of an agent's backend: its name, its parameters, and its requirement.
///
/// `"UCX"` has a default parameter: `engine_config`, with UCX settings, begins with
/// `CUDA_IPC_ENABLE_GET_ZCOPY=y`. Without it, UCX would read other processes' device memory over
/// TCP if the device has no NVLinks. Your own settings follow it and take precedence. Set them
/// [unchecked](Self::unchecked_parameter), because the plugin does not name this parameter.
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
    pub(crate) requirement: BackendRequirement,
    pub(crate) file_access: FileAccess,
}

/// A parameter of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) key: String,
    pub(crate) value: String,
    /// Whether the plugin must name it.
    pub(crate) checked: bool,
}

impl BackendConfig {
    /// Creates the configuration of a backend by NIXL's name for it: `"UCX"`, `"POSIX"`,
    /// `"GDS_MT"`.
    pub fn new(name: impl Into<BackendName>) -> Self {
        let name = name.into();
        let file_access = FileAccess::default_of(&name);
        Self {
            name,
            parameters: Vec::new(),
            requirement: BackendRequirement::IfSupported,
            file_access,
        }
    }

    /// Sets a parameter that the backend's plugin names. `build` refuses any other parameter,
    /// because NIXL would ignore it.
    ///
    /// The backend checks the value; some backends ignore a value that they cannot use.
    pub fn parameter(self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.with(key.into(), value.into(), true)
    }

    /// Sets a parameter that the backend's plugin reads but need not name.
    pub fn unchecked_parameter(self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.with(key.into(), value.into(), false)
    }

    /// Makes a registration fail if this backend does not accept it.
    pub fn required(self) -> Self {
        Self { requirement: BackendRequirement::Required, ..self }
    }

    /// Sets which descriptor the backend uses for files. By default GDS and GDS_MT use direct I/O;
    /// all others use buffered I/O.
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

/// Whether a registration requires a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BackendRequirement {
    /// The backend accepts the memory, or the registration fails.
    Required,
    /// It may refuse the memory, if another backend accepts it; the record has the reason.
    #[default]
    IfSupported,
}

/// Which file descriptor a backend uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileAccess {
    /// Through the page cache. Offsets and lengths may have any alignment.
    Buffered,
    /// Direct I/O, which requires aligned offsets, lengths and host addresses. A file without a
    /// direct descriptor is refused.
    Direct,
}

impl FileAccess {
    /// GDS moves data between a drive and a device, so the page cache would only add a copy.
    fn default_of(name: &BackendName) -> Self {
        match name.as_str() {
            "GDS" | "GDS_MT" => Self::Direct,
            _ => Self::Buffered,
        }
    }
}
