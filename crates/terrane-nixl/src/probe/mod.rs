//! Checks whether NIXL can be used, without aborting the process.

mod loader;
mod netlink;
pub(crate) mod plugins;
pub(crate) mod symbols;
mod ucx_log;
mod version;

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::Library;
use terrane_core::CapabilityReport;

use crate::error::NixlUnavailable;
use plugins::Plugin;
use symbols::REQUIRED_SYMBOLS;

/// The library's name, as the bindings look it up.
const LIBRARY: &str = "libnixl_capi.so";

/// A NIXL installation that [`probe`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlInstallation {
    library: PathBuf,
    plugin_directory: PathBuf,
    capabilities: CapabilityReport,
}

impl NixlInstallation {
    /// The file that was loaded.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The version of the library's package, from the files around it: those of a Python wheel, or
    /// of pkg-config. The library itself does not report its version.
    #[must_use]
    pub fn package_version(&self) -> Option<String> {
        version::of_package(&self.library)
    }

    /// NIXL's plugin directory: `NIXL_PLUGIN_DIR`, or `plugins` beside the library.
    #[must_use]
    pub fn plugin_directory(&self) -> &Path {
        &self.plugin_directory
    }

    /// Preparations that were made before UCX is loaded.
    ///
    /// [`SeparateRdmaLibraries`](terrane_core::Capability::SeparateRdmaLibraries) is refused if the
    /// program is linked with libnl and NIXL contains another copy. A process that has had a
    /// backend `UCX` then crashes at exit, after all other work. `UCX_MODULES=^ib` in its
    /// environment avoids the crash, but also disables RDMA.
    #[must_use]
    pub fn capabilities(&self) -> &CapabilityReport {
        &self.capabilities
    }

    /// The plugins in the directory, by name. [`Plugin::check`] tests whether one works.
    #[must_use]
    pub fn plugins(&self) -> Vec<Plugin> {
        plugins::within(&self.plugin_directory)
    }
}

/// The first library that was found is used for the whole process.
static INSTALLATION: OnceLock<NixlInstallation> = OnceLock::new();

/// Looks for NIXL's library, and for each of its functions that the bindings call.
///
/// The bindings abort the process when a function is missing. So no other code of this crate calls
/// them before this has succeeded. A success is cached, and the library stays loaded. After a
/// failure, the next call looks again. `NIXL_PLUGIN_DIR` is read once, as NIXL reads it.
///
/// # Errors
///
/// [`NixlUnavailable`] names the missing part.
pub fn probe() -> Result<NixlInstallation, NixlUnavailable> {
    installation_or(|| {
        loader::load_permanently(Path::new(LIBRARY))
            .map_err(|source| NixlUnavailable::LibraryMissing { library: LIBRARY, source })
    })
}

/// Like [`probe`], with the library in this file, for installations that the dynamic linker does
/// not find. Once it is loaded, the bindings and [`probe`] find it by its soname, which must be
/// `libnixl_capi.so` ([`NixlUnavailable::NotByName`]).
///
/// If a library was found before, that one is returned, and the file is not read.
///
/// # Errors
///
/// [`NixlUnavailable`] names the missing part.
pub fn probe_file(library: &Path) -> Result<NixlInstallation, NixlUnavailable> {
    installation_or(|| {
        loader::load_permanently(library)
            .map_err(|source| NixlUnavailable::FileMissing { library: library.to_owned(), source })
    })
}

fn installation_or(
    load: impl FnOnce() -> Result<ManuallyDrop<Library>, NixlUnavailable>,
) -> Result<NixlInstallation, NixlUnavailable> {
    if let Some(found) = INSTALLATION.get() {
        return Ok(found.clone());
    }
    let library = load()?;
    let found = examine(&library)?;
    Ok(INSTALLATION.get_or_init(|| found).clone())
}

/// Describes a library, if it has all required functions.
fn examine(library: &Library) -> Result<NixlInstallation, NixlUnavailable> {
    let mut path = PathBuf::from(LIBRARY);
    for &symbol in REQUIRED_SYMBOLS {
        let Some(address) = address_of(library, symbol) else {
            return Err(NixlUnavailable::SymbolMissing { library: path, symbol });
        };
        if path == Path::new(LIBRARY) {
            path = loader::file_at(address).unwrap_or(path);
        }
    }
    // SAFETY: the function of this name takes no argument and returns a `bool`.
    let is_stub = unsafe { library.get::<unsafe extern "C" fn() -> bool>(b"nixl_capi_is_stub") };
    if let Ok(is_stub) = is_stub {
        // SAFETY: as above; it only returns how the library was built.
        if unsafe { is_stub() } {
            return Err(NixlUnavailable::Stub { library: path });
        }
    }
    // Loaded before the bindings look it up, because they do so only once.
    let by_name = loader::load_permanently(Path::new(LIBRARY)).ok();
    let first = |library: &Library| address_of(library, REQUIRED_SYMBOLS.first()?);
    let of_bindings = by_name.as_ref().and_then(|library| first(library));
    if of_bindings != first(library) {
        let found = of_bindings.map(|at| loader::file_at(at).unwrap_or_else(|| LIBRARY.into()));
        return Err(NixlUnavailable::NotByName { library: path, found });
    }
    // The library can be loaded, so the cause is in the bindings: they keep their first result.
    if nixl_sys::is_stub() {
        return Err(NixlUnavailable::BindingsGaveUp { library: path });
    }
    // Plugins are in a folder beside the library that looks for them. This library depends on that
    // one.
    let core = address_of(library, CORE_SYMBOL).and_then(loader::file_at);
    let core = core.as_ref().unwrap_or(&path);
    let (plugin_directory, capabilities) =
        (plugins::directory(core), netlink::load_separately(core));
    Ok(NixlInstallation { library: path, plugin_directory, capabilities })
}

/// A symbol of NIXL's core: the destructor of an agent.
const CORE_SYMBOL: &str = "_ZN9nixlAgentD1Ev";

/// The address of a symbol in the library, or in one that it needs.
fn address_of(library: &Library, symbol: &str) -> Option<usize> {
    // SAFETY: the symbol is only looked up; the code does not access its address.
    let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
    Some(found.ok()?.as_raw_ptr().addr())
}
