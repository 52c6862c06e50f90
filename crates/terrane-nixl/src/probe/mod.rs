//! Whether NIXL can be used, answered without aborting the process.

mod plugins;
mod symbols;
mod version;

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};

pub use plugins::Plugin;
pub use symbols::REQUIRED_SYMBOLS;

use crate::NixlUnavailable;
use crate::error::SharedCause;

/// The library, by the name by which the bindings look for it.
const LIBRARY: &str = "libnixl_capi.so";

/// How a library of NIXL is loaded: as the bindings do it, and for good. What Abseil, which NIXL is
/// linked with, keeps for each thread does not survive unloading.
const FOR_GOOD: c_int = RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE;

/// NIXL, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    library: PathBuf,
    plugin_directory: PathBuf,
}

impl Found {
    /// The file that was loaded.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The version of the package that the library came in, where the files around it say so: those
    /// of a Python wheel, or of pkg-config. The library itself does not know its version.
    #[must_use]
    pub fn package_version(&self) -> Option<String> {
        version::of_package(&self.library)
    }

    /// Where NIXL looks for plugins: in `NIXL_PLUGIN_DIR`, or in `plugins` beside the library.
    #[must_use]
    pub fn plugin_directory(&self) -> &Path {
        &self.plugin_directory
    }

    /// Whether the names of all files in the plugin directory are text.
    pub(crate) fn plugin_names_are_text(&self) -> bool {
        plugins::names_are_text(&self.plugin_directory)
    }

    /// The plugins that are there, by name. Whether they work is for [`Plugin::check`] to say.
    #[must_use]
    pub fn plugins(&self) -> Vec<Plugin> {
        plugins::within(&self.plugin_directory)
    }
}

/// Whichever library was found first is the process's.
static FOUND: OnceLock<Found> = OnceLock::new();

/// Looks for NIXL's library, and for each function of it that the bindings call.
///
/// The bindings end the process when they miss one, so that nothing else of this crate calls them
/// before this has succeeded. A success is remembered, and the library stays loaded; after a failure
/// the next call looks again. `NIXL_PLUGIN_DIR` is read once, as NIXL reads it.
///
/// # Errors
///
/// [`NixlUnavailable`] says what is missing.
pub fn probe() -> Result<Found, NixlUnavailable> {
    found_or(|| {
        open(OsStr::new(LIBRARY))
            .map_err(|source| NixlUnavailable::LibraryMissing { library: LIBRARY, source })
    })
}

/// As [`probe`], with the library in this file, wherever it is: for installations that the dynamic
/// linker does not know of. Once it is loaded, the bindings find it by its name, as
/// [`probe`] does from then on.
///
/// If a library was found before, that one is the answer, and the file is not looked at.
///
/// # Errors
///
/// [`NixlUnavailable`] says what is missing.
pub fn probe_file(library: &Path) -> Result<Found, NixlUnavailable> {
    found_or(|| {
        open(library.as_os_str())
            .map_err(|source| NixlUnavailable::FileMissing { library: library.to_owned(), source })
    })
}

fn found_or(
    open: impl FnOnce() -> Result<Library, NixlUnavailable>,
) -> Result<Found, NixlUnavailable> {
    if let Some(found) = FOUND.get() {
        return Ok(found.clone());
    }
    let found = examine(&open()?)?;
    Ok(FOUND.get_or_init(|| found).clone())
}

fn open(name: &OsStr) -> Result<Library, SharedCause> {
    // SAFETY: loading runs the initialisers of NIXL and of the libraries that it needs, which are
    // made to be loaded into any process; the bindings load the same file in the same way.
    let library = unsafe { Library::open(Some(name), FOR_GOOD) };
    library.map_err(|error| Arc::new(error) as SharedCause)
}

/// What there is to know of a library, if it has all that is needed.
fn examine(library: &Library) -> Result<Found, NixlUnavailable> {
    let mut path = PathBuf::from(LIBRARY);
    for &symbol in REQUIRED_SYMBOLS {
        match address_of(library, symbol) {
            Some(found) => path = file_of(found).unwrap_or(path),
            None => return Err(NixlUnavailable::SymbolMissing { library: path, symbol }),
        }
    }
    // SAFETY: the function of this name takes nothing and answers with a `bool`.
    let is_stub = unsafe { library.get::<unsafe extern "C" fn() -> bool>(b"nixl_capi_is_stub") };
    if let Ok(is_stub) = is_stub {
        // SAFETY: as above; it says what the library was built from, and does nothing.
        if unsafe { is_stub() } {
            return Err(NixlUnavailable::Stub { library: path });
        }
    }
    // The library can be loaded, so that this is about the bindings: they keep their first answer.
    if nixl_sys::is_stub() {
        return Err(NixlUnavailable::BindingsGaveUp { library: path });
    }
    // The plugins lie beside the library that looks for them, which the found one needs.
    let core = address_of(library, "_ZN9nixlAgentD1Ev").and_then(file_of);
    let core = core.unwrap_or_else(|| path.clone());
    Ok(Found { plugin_directory: plugins::directory(&core), library: path })
}

/// The address of a symbol of the library, or of one that it needs.
fn address_of(library: &Library, symbol: &str) -> Option<Symbol<*const c_void>> {
    // SAFETY: the symbol is only looked for; what is at its address is neither read nor called.
    unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.ok()
}

/// The file that a symbol comes from.
fn file_of(symbol: Symbol<*const c_void>) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: any address may be asked about, and the answer has room for itself.
    let known = unsafe { libc::dladdr(symbol.as_raw_ptr(), info.as_mut_ptr()) };
    if known == 0 {
        return None;
    }
    // SAFETY: it was made of zeros, which are a valid answer too, and dladdr filled it.
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of a library that stays loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}
