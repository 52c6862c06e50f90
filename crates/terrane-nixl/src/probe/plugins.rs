//! NIXL's plugins: their location, and whether they can be loaded.

use std::ffi::c_void;
use std::path::{Path, PathBuf};

use terrane_core::BackendName;

use super::{loader, ucx_log};
use crate::error::PluginError;

/// The plugin that loads UCX.
const UCX: &str = "UCX";

const PREFIX: &str = "libplugin_";
const SUFFIX: &str = ".so";

/// A plugin that may provide a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plugin {
    name: BackendName,
    path: PathBuf,
}

impl Plugin {
    /// The name of its backend.
    #[must_use]
    pub fn name(&self) -> &BackendName {
        &self.name
    }

    /// Its file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Loads the plugin as NIXL would. It stays loaded with all the libraries that it needs, even
    /// if no backend is created from it.
    ///
    /// UCX then logs to standard error. `UCX_LOG_FILE` selects another destination. If other code
    /// loaded UCX before, its log settings stay.
    ///
    /// # Errors
    ///
    /// [`PluginError`], with the loader's error.
    pub fn check(&self) -> Result<(), PluginError> {
        let not_loaded = |source| PluginError::NotLoaded { plugin: self.path.clone(), source };
        let load = || loader::load_permanently(&self.path).map_err(not_loaded);
        let library = if self.name.as_str() == UCX { ucx_log::loading(load) } else { load() }?;
        // SAFETY: the symbol is only looked up; the code does not access its address.
        let entry = unsafe { library.get::<*const c_void>(b"nixl_plugin_init") };
        match entry {
            Ok(_) => Ok(()),
            Err(_) => Err(PluginError::NoPlugin { plugin: self.path.clone() }),
        }
    }
}

/// The plugin directory of the NIXL library at `core`.
pub(super) fn directory(core: &Path) -> PathBuf {
    #[expect(clippy::disallowed_methods, reason = "NIXL's own variable, as `probe` documents")]
    if let Some(directory) = std::env::var_os("NIXL_PLUGIN_DIR") {
        return directory.into();
    }
    let beside = core.parent().map(Path::to_path_buf).unwrap_or_default();
    beside.join("plugins")
}

/// The plugins in a directory, by name.
pub(super) fn within(directory: &Path) -> Vec<Plugin> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let plugin = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
        Some(Plugin { name: BackendName::from(name), path })
    };
    let mut plugins: Vec<_> =
        entries.filter_map(Result::ok).filter_map(|entry| plugin(entry.path())).collect();
    plugins.sort_by(|a, b| a.name.cmp(&b.name));
    plugins
}

/// Whether every file name in a directory is valid UTF-8.
pub(crate) fn names_are_text(directory: &Path) -> bool {
    let Ok(mut entries) = std::fs::read_dir(directory) else { return true };
    entries.all(|entry| entry.is_ok_and(|entry| entry.file_name().to_str().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    #[test]
    fn plugins_are_recognised_by_their_names() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["libplugin_UCX.so", "libplugin_GDS_MT.so", "libtelemetry_x.so", "libplugin_A"]
        {
            std::fs::write(directory.path().join(name), b"no library").unwrap();
        }
        let plugins = within(directory.path());
        let names: Vec<_> = plugins.iter().map(|plugin| plugin.name().as_str()).collect();
        assert_eq!(names, ["GDS_MT", "UCX"]);
        for plugin in plugins {
            let failed = plugin.check().unwrap_err();
            assert!(matches!(failed, PluginError::NotLoaded { .. }), "{failed}");
        }
        assert!(names_are_text(directory.path()));
        let odd = OsStr::from_bytes(b"libplugin_\xff.so");
        std::fs::write(directory.path().join(odd), b"no library").unwrap();
        assert!(!names_are_text(directory.path()));
        assert_eq!(within(directory.path()).len(), 2);
        assert!(within(&directory.path().join("nowhere")).is_empty());
    }
}
