//! Whether NIXL can be used, answered without aborting the process.

mod symbols;

use std::ffi::{CStr, OsStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW, Symbol};

pub use symbols::REQUIRED_SYMBOLS;

use crate::NixlUnavailable;

/// The library, by the name by which the bindings look for it.
const LIBRARY: &str = "libnixl_capi.so";

/// NIXL, as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    library: PathBuf,
}

impl Found {
    /// The file that was loaded.
    #[must_use]
    pub fn library(&self) -> &Path {
        &self.library
    }
}

/// Looks for NIXL's library, and for each function of it that the bindings call.
///
/// The bindings end the process when they miss one, so that nothing else of this crate calls them
/// before this has succeeded. A success is remembered, and the library stays loaded; after a failure
/// the next call looks again.
///
/// # Errors
///
/// [`NixlUnavailable`] says what is missing.
pub fn probe() -> Result<Found, NixlUnavailable> {
    static FOUND: OnceLock<Loaded> = OnceLock::new();
    if let Some(loaded) = FOUND.get() {
        return Ok(loaded.found.clone());
    }
    let loaded = load()?;
    Ok(FOUND.get_or_init(|| loaded).found.clone())
}

struct Loaded {
    found: Found,
    /// Held for ever, so that what the bindings look up stays where it is.
    _library: Library,
}

fn load() -> Result<Loaded, NixlUnavailable> {
    // SAFETY: loading runs the initialisers of NIXL and of the libraries that it needs, which are
    // made to be loaded into any process; the bindings load the same file in the same way.
    let library = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|e| NixlUnavailable::LibraryMissing { library: LIBRARY, source: Arc::new(e) })?;
    let mut path = PathBuf::from(LIBRARY);
    for &symbol in REQUIRED_SYMBOLS {
        // SAFETY: the symbol is only looked for; its address is asked for and never called.
        let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
        match found {
            Ok(found) => path = file_of(found).unwrap_or(path),
            Err(_) => {
                return Err(NixlUnavailable::SymbolMissing { library: path, symbol });
            }
        }
    }
    // SAFETY: the function of this name takes nothing and answers with a `bool`.
    let is_stub = unsafe { library.get::<unsafe extern "C" fn() -> bool>(b"nixl_capi_is_stub") };
    if let Ok(is_stub) = is_stub {
        // SAFETY: as above; it only says what the library was built from.
        if unsafe { is_stub() } {
            return Err(NixlUnavailable::Stub { library: path });
        }
    }
    // The library can be loaded, so that this answers for the bindings: they keep their first answer.
    if nixl_sys::is_stub() {
        return Err(NixlUnavailable::BindingsGaveUp);
    }
    Ok(Loaded { found: Found { library: path }, _library: library })
}

/// The file that a symbol comes from.
fn file_of(symbol: Symbol<*const c_void>) -> Option<PathBuf> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the address is one of the library's, and the answer has room for itself.
    let known = unsafe { libc::dladdr(symbol.as_raw_ptr(), info.as_mut_ptr()) };
    if known == 0 {
        return None;
    }
    // SAFETY: all zero bytes are a valid answer too, and dladdr filled it.
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of a library that stays loaded while it is copied here.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}
